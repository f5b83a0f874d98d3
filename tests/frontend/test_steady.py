"""Steady choices: columns serve the clients as the loop does, and the choices know all of it when somebody looks."""

from typing import Any

import pytest
from answering import LENGTH, asking, filled
from msgspec.structs import replace

from meshlm.frontend.answers import StreamAnswer, WholeAnswer
from meshlm.frontend.burst import Direct
from meshlm.frontend.desk import Desk
from meshlm.protocol.columns import pack_i32
from meshlm.protocol.ids import Handle, Identity, Role
from meshlm.protocol.text_edge import Finished, TextDeltas

D0 = Identity(Role.DETOKENIZER)
ASKS: list[dict[str, Any]] = [
    {"stream": True},
    {"stream": False},
    {"stream": True, "return_token_ids": True},  # its rows go the general way
    {"stream": True, "continuous_usage": True},
]


class Client:
    """A line whose socket has room."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.num_direct = 0

    def write(self, event: bytes) -> None:
        self.events.append(event)

    def lend(self, slots: list[Direct | None], place: int) -> None:
        slots[place] = self.direct

    def direct(self, chunk: bytes) -> int:
        size, _, event = chunk.partition(b"\r\n")
        assert len(event) - 2 == int(size, 16)
        self.events.append(event[:-2])
        self.num_direct += 1
        return len(chunk)

    def rest(self, data: bytes) -> None:
        raise AssertionError("the socket took everything")


class Bench:
    """Four requests, one of each sort; a check after every message."""

    def __init__(self, fewest_steady: int) -> None:
        self.desk = Desk()
        self.desk.fewest_steady = fewest_steady  # type: ignore[misc]
        self.desk.detokenizer_up(D0)
        clients = [Client() for _ in ASKS]
        self.events = [client.events for client in clients]
        self.clients = clients
        self.answers: list[StreamAnswer | WholeAnswer] = []
        self.num_steady = 0
        for number, changes in enumerate(ASKS):
            ask = asking(False, **changes)
            if ask.stream:
                client = clients[number]
                answer = StreamAnswer(ask, "cmpl-1", 1700000000, "tiny", lambda: None, client.write, None, client)
                self.answers.append(filled(answer))
            else:
                self.answers.append(filled(WholeAnswer(ask, "cmpl-1", 1700000000, "tiny", lambda: None)))
            (choice,) = self.answers[-1].choices
            choice.handle = Handle(number + 1)
            self.desk.open([choice], replace(choice.submit, handles=(choice.handle,)))

    def message(self, number: int, start: int, width: int = 1, finished: list[Finished] | None = None) -> None:
        rows = range(len(ASKS))
        deltas = TextDeltas(
            pack_i32(row + 1 for row in rows),
            pack_i32([start] * len(ASKS)),
            pack_i32([width] * len(ASKS)) if width > 1 else b"",
            pack_i32(100 * number + 10 * row + nth for row in rows for nth in range(width)),
            ["" if (row + number) % 3 == 0 else f"é{row}" * width for row in rows],
            finished or [],
        )
        assert self.desk.deltas(deltas, D0, float(number)) == []
        self.num_steady += bool(self.desk._steady)
        self.desk.check()


def played(fewest_steady: int) -> Bench:
    bench, start = Bench(fewest_steady), 0
    for number, width in enumerate((1, 1, 1, 2, 1, 3), 1):
        bench.message(number, start, width)
        start += width
    bench.desk.expire(0.0)
    bench.message(7, start)
    bench.message(7, start)  # a repetition
    bench.message(8, start + 1, 1, [replace(LENGTH, row=row) for row in range(len(ASKS))])
    return bench


def test_columns_serve_what_the_loop_serves() -> None:
    columns, loop = played(1), played(10_000)
    assert columns.num_steady >= 5 > loop.num_steady == 0
    assert columns.events == loop.events
    assert [client.num_direct > 0 for client in columns.clients] == [True, False, False, False]
    assert [len(events) > 4 for events in columns.events] == [True, False, True, True]
    for mine, theirs in zip(columns.answers, loop.answers, strict=True):
        assert mine.choices[0].token_ids == theirs.choices[0].token_ids
        assert (mine.choices[0].first_at, mine.choices[0].last_at) == (1.0, 8.0)
        assert mine.usage() == theirs.usage()
    assert columns.desk.intervals == loop.desk.intervals
    assert columns.desk.num_tokens == loop.desk.num_tokens
    (mine, theirs) = columns.answers[1], loop.answers[1]
    assert isinstance(mine, WholeAnswer)
    assert isinstance(theirs, WholeAnswer)
    assert mine.body() == theirs.body()


@pytest.mark.parametrize("number_left", range(len(ASKS)))
def test_a_client_that_leaves_ends_the_columns(number_left: int) -> None:
    bench = Bench(1)
    for number in range(1, 5):
        bench.message(number, number - 1)
    choice = bench.answers[number_left].choices[0]
    bench.desk.close([choice])
    bench.desk.check()
    assert list(choice.token_ids) == [100 * number + 10 * number_left for number in range(1, 5)]
    assert choice.last_at == 4.0


def test_a_dead_detokenizers_choices_go_on_after_all_that_came() -> None:
    bench = Bench(1)
    for number in range(1, 5):
        bench.message(number, number - 1)
    bench.desk.detokenizer_down(D0, 0.0)
    assert [choice.begun_with for answer in bench.answers for choice in answer.choices] == [4] * len(ASKS)
