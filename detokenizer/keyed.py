"""Which requests have an Idempotency-Key, and how long they wait for their clients. Pure; owned by core.py.

A request whose client is away runs on; a finished one is kept, for `window_s` each, and all finished ones together take
`max_bytes` at most: the oldest go first. A request that goes is forgotten: the next one with its key begins anew.
"""

from meshlm.detokenizer.stream import Stream, StreamState
from meshlm.protocol.ids import ErrorKind, RequestId
from meshlm.protocol.text_edge import Rejected, Submit

MAX_BYTES = 64 << 20
LOGPROB_BYTES = 300  # of one entry, as Python objects
OTHER_BODY = "Idempotency-Key: this key was used for another request before; a new request needs a new key"
TAKEN_OVER = "Idempotency-Key: another connection sent the same request later and has its answer"
PARAM = "Idempotency-Key"


class Keyed:
    """See the module docstring."""

    def __init__(self, window_s: float, max_bytes: int = MAX_BYTES) -> None:
        self.window_s, self.max_bytes = window_s, max_bytes
        self.bodies: dict[str, bytes] = {}  # key -> digest of what was asked
        self.members: dict[str, set[RequestId]] = {}  # key -> the requests that exist
        self.until: dict[RequestId, float] = {}  # those without a client, the first to go first
        self.sizes: dict[RequestId, int] = {}  # the finished ones among them
        self.num_bytes = 0

    def refusal(self, submit: Submit) -> Rejected | None:
        """The answer to a key that stands for something else."""
        retry = submit.retry
        if retry is None or self.bodies.get(retry.key, retry.body) == retry.body:
            return None
        return Rejected(submit.handles, ErrorKind.CONFLICT, OTHER_BODY, PARAM)

    def add(self, stream: Stream) -> None:
        if (retry := stream.submit.retry) is not None:
            self.bodies[retry.key] = retry.body
            self.members.setdefault(retry.key, set()).add(stream.request_id)

    def remove(self, stream: Stream) -> None:
        if (retry := stream.submit.retry) is None:
            return
        self.back(stream)
        members = self.members[retry.key]
        members.discard(stream.request_id)
        if not members:
            del self.members[retry.key], self.bodies[retry.key]

    def back(self, stream: Stream) -> None:
        """Its client is there."""
        self.until.pop(stream.request_id, None)
        self.num_bytes -= self.sizes.pop(stream.request_id, 0)

    def wait(self, stream: Stream, now: float) -> list[RequestId]:
        """From now on it waits for its client; the requests that go for lack of room."""
        self.back(stream)
        self.until[stream.request_id] = now + self.window_s
        if stream.state is not StreamState.FINISHED:
            return []
        self.sizes[stream.request_id] = size = size_of(stream)
        self.num_bytes += size
        gone: list[RequestId] = []
        excess = self.num_bytes - self.max_bytes
        for request_id, of_one in self.sizes.items():
            if excess <= 0:
                break
            gone.append(request_id)
            excess -= of_one
        return gone

    def over(self, now: float) -> list[RequestId]:
        """Those that waited long enough."""
        gone: list[RequestId] = []
        for request_id, until in self.until.items():
            if until > now:
                break
            gone.append(request_id)
        return gone

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        assert self.bodies.keys() == self.members.keys()
        assert all(self.members.values()), "a key without a request"
        assert self.num_bytes == sum(self.sizes.values()) <= self.max_bytes
        assert self.sizes.keys() <= self.until.keys()
        assert list(self.until.values()) == sorted(self.until.values())


def size_of(stream: Stream) -> int:
    """Bytes that a finished request takes, about."""
    columns = 4 * (len(stream.prompt) + len(stream.emitted))
    positions = [*stream.logprobs, *(stream.prompt_logprobs or ())]
    entries = sum(1 + len(position.top) for position in positions if position is not None)
    return 2000 + columns + LOGPROB_BYTES * entries
