"""A tracker and its clients without HTTP, fed by hand: shared by test_request_tracker.py and test_tracker_deaths.py."""

import msgspec

from meshlm.protocol.edges.text import Accepted, Submit, TextDeltas, TextPrompt
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Identity, RequestId, Role
from meshlm.runtime.client.placement import Choice, RowDetails
from meshlm.runtime.client.request_tracker import RequestTracker
from meshlm.runtime.process.events import Send

D0, D1, D2 = (Identity(Role.DETOKENIZER, index) for index in range(3))


def truth(request_id: str, index: int) -> int:
    """Output token `index` of a request, whoever computes it."""
    return sum(map(ord, request_id)) * 31 + index


def word(token: int) -> str:
    return f" {token}"


class Client:
    """A ResponseSink that writes down what it is told, and accepts nothing after an end."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []
        self.has_begun = False
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.ends: dict[int, FinishReason] = {}
        self.errors: dict[int, tuple[ErrorKind, str, str]] = {}
        self.num_accepted = 0
        self.rows: list[tuple[int, RowDetails]] = []
        self.closed = False

    def accepted(self, choice: Choice, accepted: Accepted) -> None:
        assert not self.closed
        self.num_accepted += 1

    def row(self, choice: Choice, num_tokens: int, text: str, details: RowDetails | None) -> None:
        assert not self.closed, "news for a client that left"
        assert choice.index not in self.ends, "news after the end"
        self.tokens.setdefault(choice.index, []).extend(choice.token_ids[len(choice.token_ids) - num_tokens :])
        self.texts[choice.index] = self.texts.get(choice.index, "") + text
        if details is not None:
            self.rows.append((choice.index, details))
            if details.finished is not None:
                self.ends[choice.index] = details.finished.reason

    def failed(self, choice: Choice, kind: ErrorKind, message: str, param: str) -> None:
        assert not self.closed, "news for a client that left"
        assert choice.index not in self.ends, "two ends"
        self.ends[choice.index] = FinishReason.ERROR
        self.errors[choice.index] = (kind, message, param)


def opened(tracker: RequestTracker, name: str = "r", n: int = 1, deadline_s: float = 0.0) -> tuple[Client, list[Send]]:
    """A client with one prompt and n choices, as submits.py makes them."""
    client = Client()
    handles = tuple(tracker.new_handle() for _ in range(n))
    names = tuple(RequestId(f"{name}-{index}") for index in range(n))
    submit = Submit(handles, names, TextPrompt("hi"), SamplingParams(seed=7), deadline_s=deadline_s)
    for index, (handle, request_id) in enumerate(zip(handles, names, strict=True)):
        own = msgspec.structs.replace(
            submit, handles=(handle,), request_ids=(request_id,), sampling=SamplingParams(seed=7 + index)
        )
        client.choices.append(Choice(client, index, 0, own, handle))
    sends = tracker.open(client.choices, submit)
    tracker.check()
    return client, sends


def deltas(*rows: tuple[Choice | int, int, list[int]], **more: object) -> TextDeltas:
    """Rows of (choice or handle, start, tokens)."""
    handles = [row[0].handle if isinstance(row[0], Choice) else row[0] for row in rows]
    found = TextDeltas(
        pack_i32(handles),
        pack_i32([start for _, start, _ in rows]),
        pack_i32([len(tokens) for _, _, tokens in rows]),
        pack_i32([token for _, _, tokens in rows for token in tokens]),
        ["".join(map(word, tokens)) for _, _, tokens in rows],
    )
    return msgspec.structs.replace(found, **more)


def a_desk(*detokenizers: Identity) -> RequestTracker:
    tracker = RequestTracker()
    for identity in detokenizers or (D0,):
        assert tracker.detokenizer_up(identity) == []
    return tracker
