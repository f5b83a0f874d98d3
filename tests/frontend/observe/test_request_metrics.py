"""What the metrics observe of requests, and when: as their tokens come and as their sequences end."""

from typing import Any

import answering
import pytest

from meshlm.frontend.http.retry import IdempotencyKey
from meshlm.frontend.observe.observer import CHOICES_AT_ONCE, observe_end, observe_tokens
from meshlm.frontend.openai.responses import AnswerHead, WholeResponse
from meshlm.frontend.requests.submits import build_each
from meshlm.protocol.edges.text import Accepted, Finished, Rejected, TextDeltas
from meshlm.protocol.edges.token import First
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Identity, Role
from meshlm.runtime.client.placement import Choice
from meshlm.runtime.client.request_tracker import RequestTracker

D0 = Identity(Role.DETOKENIZER, 0)
MAX_MODEL_LEN = 4096


class Recorder:
    """In the place of Metrics: what was observed, by engine and name."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {}

    def engine(self, engine: str) -> Any:
        return _Engine(self.seen, engine)

    def flush(self) -> None: ...

    def first_token(self, seconds: float) -> None:
        """In the place of Feed, too."""

    def interval(self, seconds: float, times: int) -> None: ...

    def take(self) -> dict[str, list[Any]]:
        seen, self.seen = self.seen, {}
        return seen


class _Engine:
    def __init__(self, seen: dict[str, list[Any]], engine: str) -> None:
        self._seen, self._engine = seen, engine

    def __getattr__(self, name: str) -> Any:
        seen, key = self._seen, f"{name}/{self._engine}"

        class Observed:
            def observe(self, *values: Any) -> None:
                seen.setdefault(key, []).append(values if len(values) > 1 else values[0])

            inc = __call__ = observe

        return Observed()


class Client:
    """One HTTP request of a tracker with one detokenizer."""

    def __init__(self, tracker: RequestTracker, again: IdempotencyKey | None = None, **ask: Any) -> None:
        self.tracker, self.metrics = tracker, Recorder()
        self.num_turns = 0  # that the end left to others
        answer: Any = WholeResponse(
            AnswerHead(
                answering.asking(False, num_returned=ask.get("num_choices", 1), **ask), "id", 0, "m", lambda: None
            )
        )
        self.answer: WholeResponse = answer
        for choices, submit in list(build_each(answer, answer.parsed_request, tracker.new_handle, -1, again)):
            for choice in choices:
                choice.opened_at = 10.0
            tracker.open(choices, submit)

    @property
    def choices(self) -> list[Choice]:
        return self.answer.choices

    def accepted(self, num_prompt: int, *, num_told: tuple[int, ...] = (), arrival_s: float = 0.0) -> None:
        handles = tuple(choice.handle for choice in self.choices)
        self.tracker.accepted(Accepted(handles, num_prompt, num_told=num_told, arrival_s=arrival_s))

    def row(self, place: int, tokens: list[int], now: float, end: FinishReason | None = None, rank: int = 2) -> None:
        choice = self.choices[place]
        have = len(choice.token_ids)
        finished = [Finished(0, end, None, have + len(tokens))] if end else []
        first = {} if have else {0: First(0, 1_000_000, 2_000_000, rank)}
        columns = (pack_i32([choice.handle]), pack_i32([have]), pack_i32([len(tokens)]), pack_i32(tokens))
        self.tracker.deltas(TextDeltas(*columns, ["x"], finished, first=first), D0, now)

    def seen(self) -> dict[str, list[Any]]:
        observe_tokens(self.metrics, self.tracker, self.metrics)  # type: ignore[arg-type]
        return self.metrics.take()

    def end(self) -> dict[str, list[Any]]:
        observe_tokens(self.metrics, self.tracker, self.metrics)  # type: ignore[arg-type]
        self.num_turns = len(list(observe_end(self.metrics, self.answer, MAX_MODEL_LEN)))  # type: ignore[arg-type]
        return self.metrics.take()


@pytest.fixture
def tracker() -> RequestTracker:
    tracker = RequestTracker()
    tracker.detokenizer_up(D0)
    return tracker


def test_the_first_token_is_observed_when_it_comes(tracker: RequestTracker) -> None:
    """And the prompt's tokens are counted, while the request runs."""
    client = Client(tracker)
    client.accepted(7)
    assert client.seen() == {}
    client.row(0, [1], 10.5)
    assert client.seen() == {"ttft/2": [0.5], "prefilled/2": [(7, 0)], "generation_tokens/2": [1]}
    client.row(0, [2], 10.75)
    assert client.seen() == {"itl/2": [(0.25, 1)], "generation_tokens/2": [1]}


def test_a_sequence_is_observed_at_its_end(tracker: RequestTracker) -> None:
    client = Client(tracker, num_choices=2, max_tokens=None)
    client.accepted(96)
    client.row(0, [1], 11.0)
    client.row(0, [2, 3], 12.0, FinishReason.LENGTH)
    client.row(1, [1], 11.0, FinishReason.STOP, rank=3)
    seen = client.end()
    assert (seen["e2e/2"], seen["e2e/3"]) == ([2.0], [1.0])
    assert (seen["finished/2"], seen["finished/3"]) == ([FinishReason.LENGTH], [FinishReason.STOP])
    assert (seen["prompt/2"], seen["generation/2"], seen["tpot/2"]) == ([96], [3], [0.5])
    assert seen["max_tokens/2"] == [4000], "what it may use"
    assert seen["phases/2"][0][1] == 1.0
    assert (seen["n/2"], seen["longest/2"]) == ([2], [3])
    assert "n/3" not in seen


@pytest.mark.parametrize("kind", [ErrorKind.INVALID, ErrorKind.OVERLOADED, ErrorKind.CONFLICT])
def test_what_the_mesh_refuses_is_observed_nowhere(tracker: RequestTracker, kind: ErrorKind) -> None:
    client = Client(tracker, num_choices=2)
    handles = tuple(choice.handle for choice in client.choices)
    tracker.rejected(Rejected(handles, kind, "no"))
    assert client.end() == {}


def test_what_the_scheduler_refuses_is_observed_nowhere(tracker: RequestTracker) -> None:
    client = Client(tracker)
    client.accepted(7)
    finished = Finished(0, FinishReason.ERROR, None, 0, "too long", ErrorKind.INVALID, "max_tokens")
    columns = (pack_i32([client.choices[0].handle]), pack_i32([0]), pack_i32([0]), b"")
    tracker.deltas(TextDeltas(*columns, [""], [finished]), D0, 11.0)
    assert client.end() == {}


def test_the_latency_of_what_a_client_left_is_observed(tracker: RequestTracker) -> None:
    """Up to its last token: the tokens count, so histograms without it would not fit them."""
    client = Client(tracker)
    client.accepted(7)
    client.row(0, [1], 10.5)
    client.row(0, [2], 10.75)
    assert client.seen()
    tracker.close(client.choices)
    seen = client.end()
    assert (seen["finished/2"], seen["e2e/2"], seen["tpot/2"]) == ([FinishReason.ABORT], [0.75], [0.25])
    assert (seen["prompt/2"], seen["generation/2"], seen["longest/2"]) == ([7], [2], [2])


def test_what_a_client_left_before_its_first_token_has_no_latency(tracker: RequestTracker) -> None:
    client = Client(tracker)
    client.accepted(7)
    tracker.close(client.choices)
    (seen,) = client.end().values()
    assert seen == [FinishReason.ABORT]


def test_a_keyed_request_is_counted_once(tracker: RequestTracker) -> None:
    """By the connection that sees its end: the one before left, the one after reads it again."""
    again = IdempotencyKey("0" * 32, b"", "")
    left = Client(tracker, again)
    left.accepted(7, arrival_s=left.choices[0].submit.arrival_s)
    left.row(0, [1, 2], 10.5)
    assert left.seen()["prefilled/2"] == [(7, 0)]
    tracker.close(left.choices)
    assert left.end() == {}
    back = Client(tracker, again)
    back.accepted(7, num_told=(2,), arrival_s=back.choices[0].submit.arrival_s - 5.0)
    back.row(0, [1, 2], 10.5)
    assert back.seen() == {}
    back.row(0, [3], 11.0, FinishReason.STOP)
    seen = back.end()
    assert (seen["finished/2"], seen["generation_tokens/2"], seen["e2e/2"]) == ([FinishReason.STOP], [1], [6.0])
    assert not {"ttft/2", "tpot/2", "phases/2", "prefilled/2"} & seen.keys()
    reader = Client(tracker, again)
    reader.accepted(7, num_told=(3,), arrival_s=1.0)
    reader.row(0, [1, 2, 3], 10.5, FinishReason.STOP)
    assert reader.end() == {}


def test_the_end_of_many_sequences_leaves_others_their_turn(tracker: RequestTracker) -> None:
    """4,000 of them were 20 ms, and longer on a busy machine."""
    client = Client(tracker, num_choices=2 * CHOICES_AT_ONCE + 1)
    client.accepted(1)
    for place in range(len(client.choices)):
        client.row(place, [1], 11.0, FinishReason.LENGTH)
    seen = client.end()
    assert client.num_turns == 2
    assert (len(seen["e2e/2"]), seen["n/2"]) == (len(client.choices), [len(client.choices)])
