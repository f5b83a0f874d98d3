"""The requests that have an Idempotency-Key, and how long they wait for their clients. Pure; owned by core.py.

A request whose client is away runs on; a finished one is kept, for `window_s` each, and all finished ones together take
`max_bytes` at most, those that run on `max_running_bytes`: the oldest go first. A request that goes is forgotten: the next one
with its key begins anew.
"""

from collections.abc import Mapping
from itertools import takewhile

from meshlm.detokenizer.request_state import RequestState
from meshlm.detokenizer.states import RequestStatus
from meshlm.protocol.edges.text import Rejected, Submit, num_bytes_of
from meshlm.protocol.logprobs import num_bytes_of_prompt
from meshlm.protocol.wire.ids import ErrorKind, RequestId

MAX_BYTES = 64 << 20
MAX_RUNNING_BYTES = 32 << 20
BIAS_BYTES, ID_BYTES = 120, 40  # of one entry, as Python objects
OTHER_BODY = "Idempotency-Key: this key was used for another request before; a new request needs a new key"
TAKEN_OVER = "Idempotency-Key: another connection sent the same request later and has its answer"
PARAM = "Idempotency-Key"


class Keyed:
    """The keys of requests, and the requests without a client."""

    def __init__(self, window_s: float, max_bytes: int = MAX_BYTES, max_running_bytes: int = MAX_RUNNING_BYTES) -> None:
        self.window_s = window_s
        self.bodies: dict[str, bytes] = {}  # key -> digest of what was asked
        self.members: dict[str, set[RequestId]] = {}  # key -> the requests that exist
        self.until: dict[RequestId, float] = {}  # those without a client, the first to go first
        self.finished, self.running = _Pool(max_bytes), _Pool(max_running_bytes)  # of those

    def refusal(self, submit: Submit) -> Rejected | None:
        """The answer to a key that stands for something else."""
        retry = submit.retry
        if retry is None or self.bodies.get(retry.key, retry.body) == retry.body:
            return None
        return Rejected(submit.handles, ErrorKind.CONFLICT, OTHER_BODY, PARAM)

    def add(self, request: RequestState) -> None:
        if (retry := request.submit.retry) is not None:
            self.bodies[retry.key] = retry.body
            self.members.setdefault(retry.key, set()).add(request.request_id)

    def remove(self, request: RequestState) -> None:
        if (retry := request.submit.retry) is None:
            return
        self.back(request)
        members = self.members[retry.key]
        members.discard(request.request_id)
        if not members:
            del self.members[retry.key], self.bodies[retry.key]

    def back(self, request: RequestState) -> None:
        """The request's client is there (again)."""
        self.until.pop(request.request_id, None)
        self.finished.remove(request.request_id)
        self.running.remove(request.request_id)

    def wait(self, request: RequestState, now: float) -> list[RequestId]:
        """The request waits for its client from now on. Gives the requests that must go for lack of space."""
        self.back(request)
        self.until[request.request_id] = now + self.window_s
        pool = self.finished if request.status is RequestStatus.FINISHED else self.running
        return pool.add(request.request_id, size_of(request))

    def measure(self, requests: Mapping[RequestId, RequestState]) -> list[RequestId]:
        """Requests that run without a client have grown since they were measured. Gives the requests that must go for lack of space."""
        return self.running.measure({request_id: size_of(requests[request_id]) for request_id in self.running.sizes})

    def over(self, now: float) -> list[RequestId]:
        """Gives the requests that have waited long enough."""
        return list(takewhile(lambda request_id: self.until[request_id] <= now, self.until))

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        assert self.bodies.keys() == self.members.keys()
        assert all(self.members.values()), "a key without a request"
        assert self.finished.sizes.keys() | self.running.sizes.keys() == self.until.keys()
        self.finished.check()
        self.running.check()
        assert list(self.until.values()) == sorted(self.until.values())


class _Pool:
    """Requests that take `max_bytes` together at most."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self.sizes: dict[RequestId, int] = {}  # the oldest first

    def add(self, request_id: RequestId, size: int) -> list[RequestId]:
        """Adds a request, and gives those that must go for it, perhaps itself."""
        self.sizes[request_id] = size
        self.num_bytes += size
        return self._gone()

    def measure(self, sizes: dict[RequestId, int]) -> list[RequestId]:
        """The sizes of all requests, in the same order. Gives those that must go."""
        self.sizes, self.num_bytes = sizes, sum(sizes.values())
        return self._gone()

    def _gone(self) -> list[RequestId]:
        gone: list[RequestId] = []
        while self.num_bytes > self.max_bytes:
            gone.append(next(iter(self.sizes)))
            self.remove(gone[-1])
        return gone

    def remove(self, request_id: RequestId) -> None:
        self.num_bytes -= self.sizes.pop(request_id, 0)

    def check(self) -> None:
        """AssertionError when the state contradicts itself."""
        assert self.num_bytes == sum(self.sizes.values()) <= self.max_bytes


def size_of(request: RequestState) -> int:
    """Bytes that a request takes, about: with its prompt as it was asked, and what the client listed."""
    columns = 4 * (len(request.prompt) + len(request.output_token_ids))
    of_prompt = 0 if request.prompt_logprobs is None else num_bytes_of_prompt(request.prompt_logprobs)
    submit, params = request.submit, request.submit.sampling
    num_ids = len(params.allowed_token_ids) + len(params.stop_token_ids)
    listed = BIAS_BYTES * len(params.logit_bias) + ID_BYTES * num_ids
    texts = num_bytes_of(submit.prompt) + sum(map(len, submit.text.stop))
    return 2000 + len(request.pooled) + columns + request.logprobs.num_bytes + of_prompt + listed + texts
