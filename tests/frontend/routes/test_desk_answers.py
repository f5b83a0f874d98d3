"""Frames of several rows through the tracker into answers of every sort: whole, streamed, with token ids, with usage."""

from typing import Any

import pytest
from answering import LENGTH, asking, body, chunks, filled
from msgspec.structs import replace

from meshlm.frontend.openai.responses import AnswerHead, WholeResponse
from meshlm.frontend.openai.stream_response import StreamResponse
from meshlm.protocol.edges.text import Finished, TextDeltas
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, Identity, Role
from meshlm.runtime.client.request_tracker import RequestTracker

D0 = Identity(Role.DETOKENIZER)
ASKS: list[dict[str, Any]] = [
    {"stream": True},
    {"stream": False},
    {"stream": True, "return_token_ids": True},
    {"stream": True, "continuous_usage": True},
]
WIDTHS = (1, 1, 1, 2, 1, 3, 1, 1)  # tokens of each row, by message


def text_of(row: int, number: int, width: int) -> str:
    """ "" while a character is incomplete."""
    return "" if (row + number) % 3 == 0 else f'é{row}\n"' * width


class Bench:
    """Four requests, one of each sort; a check after every message."""

    def __init__(self) -> None:
        self.tracker = RequestTracker()
        self.tracker.detokenizer_up(D0)
        self.events: list[list[bytes]] = [[] for _ in ASKS]
        self.answers: list[StreamResponse | WholeResponse] = []
        for number, changes in enumerate(ASKS):
            ask = asking(False, **changes)
            if ask.answer.stream:
                write = self.events[number].append
                self.answers.append(
                    filled(StreamResponse(AnswerHead(ask, "cmpl-1", 1700000000, "tiny", lambda: None), write))
                )
            else:
                self.answers.append(filled(WholeResponse(AnswerHead(ask, "cmpl-1", 1700000000, "tiny", lambda: None))))
            (choice,) = self.answers[-1].choices
            choice.handle = Handle(number + 1)
            self.tracker.open([choice], replace(choice.submit, handles=(choice.handle,)))

    def message(self, number: int, start: int, width: int = 1, finished: list[Finished] | None = None) -> None:
        rows = range(len(ASKS))
        deltas = TextDeltas(
            pack_i32(row + 1 for row in rows),
            pack_i32([start] * len(ASKS)),
            pack_i32([width] * len(ASKS)) if width > 1 else b"",
            pack_i32(token_ids(row, number, width)[nth] for row in rows for nth in range(width)),
            [text_of(row, number, width) for row in rows],
            finished or [],
        )
        assert self.tracker.deltas(deltas, D0, float(number)) == []
        self.tracker.check()


def token_ids(row: int, number: int, width: int) -> list[int]:
    return [100 * number + 10 * row + nth for nth in range(width)]


def test_every_client_reads_its_texts_in_order() -> None:
    bench, start = Bench(), 0
    for number, width in enumerate(WIDTHS, 1):
        ends = [replace(LENGTH, row=row) for row in range(len(ASKS))] if number == len(WIDTHS) else []
        bench.message(number, start, width, ends)
        if number == 7:
            bench.message(number, start, width)  # a repetition
            assert bench.tracker.expire(0.0) == []
        start += width
    for row, (answer, events) in enumerate(zip(bench.answers, bench.events, strict=True)):
        expected = "".join(text_of(row, number, width) for number, width in enumerate(WIDTHS, 1))
        choice = answer.choices[0]
        assert list(choice.token_ids) == [t for n, width in enumerate(WIDTHS, 1) for t in token_ids(row, n, width)]
        assert (choice.first_at, choice.last_at) == (1.0, float(len(WIDTHS)))
        if isinstance(answer, WholeResponse):
            assert body(answer)["choices"][0]["text"] == expected
            continue
        read = [chunk["choices"][0] for chunk in chunks(events, False)]
        assert "".join(entry["text"] for entry in read) == expected
        if answer.parsed_request.answer.return_token_ids:
            assert [t for entry in read for t in entry["token_ids"]] == list(choice.token_ids)
    assert bench.tracker.counts[""].num_tokens == len(ASKS) * sum(WIDTHS)
    assert bench.tracker.counts[""].intervals == {1.0: len(ASKS) * (len(WIDTHS) - 1)}


@pytest.mark.parametrize("number_left", range(len(ASKS)))
def test_a_client_that_leaves_has_what_came_before(number_left: int) -> None:
    bench = Bench()
    for number in range(1, 5):
        bench.message(number, number - 1)
    choice = bench.answers[number_left].choices[0]
    bench.tracker.close([choice])
    bench.message(5, 4)
    assert list(choice.token_ids) == [100 * number + 10 * number_left for number in range(1, 5)]
    assert choice.last_at == 4.0


def test_a_dead_detokenizers_choices_go_on_after_all_that_came() -> None:
    bench = Bench()
    for number in range(1, 5):
        bench.message(number, number - 1)
    bench.tracker.detokenizer_down(D0, 0.0)
    assert [choice.begun_with for answer in bench.answers for choice in answer.choices] == [4] * len(ASKS)
