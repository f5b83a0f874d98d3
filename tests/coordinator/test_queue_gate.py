"""What frontends are told of a full queue: at the first refusal, and when there is room."""

from coordinator_bench import D0, F0, S0, Bench, admit, load, member, only

from meshlm.coordinator.queue_gate import LOOK_S, PAUSE_S
from meshlm.protocol.edges import control
from meshlm.protocol.edges.admit import Refused
from meshlm.protocol.edges.control import QueueFull
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.process.events import Send

F1 = Identity(Role.FRONTEND, 1)


def told(sends: list[Send]) -> list[tuple[Identity, bool]]:
    return [(send.to, send.message.on) for send in sends if isinstance(send.message, QueueFull)]


def full(max_waiting: int = 2) -> Bench:
    """A mesh whose one rank has as many waiting as may wait."""
    bench = Bench(F0, D0, S0, max_waiting=max_waiting)
    bench.says(S0, load(4, max_waiting))
    return bench


def test_the_first_refusal_closes_the_door_once() -> None:
    bench = full()
    sends = bench.says(D0, admit("a"))
    assert len(only(sends, Refused)) == 1
    assert told(sends) == [(F0, True)]
    assert told(bench.says(D0, admit("b"))) == [], "they know"


def test_room_opens_it() -> None:
    bench = full()
    bench.says(D0, admit("a"))
    bench.now += 2 * LOOK_S
    assert told(bench.says(S0, load(4, 2))) == []
    bench.now += 2 * LOOK_S
    assert told(bench.says(S0, load(4, 1))) == [(F0, False)]
    assert told(bench.says(S0, load(4, 0))) == []


def test_a_queue_at_its_limit_is_not_told_of_all_the_time() -> None:
    bench = full()
    said = 0
    for step in range(1000):  # one a millisecond: room and no room in turn
        bench.now = step / 1000
        said += len(told(bench.says(S0, load(4, 2 - step % 2))))
        said += len(told(bench.says(D0, admit(f"r{step}"))))
        bench.says(S0, load(4, 2))
    assert 10 < said <= 2 * (1.0 / PAUSE_S) + 1


def test_one_that_comes_later_hears_of_it_and_it_is_over_with_the_ranks() -> None:
    bench = full()
    bench.says(D0, admit("a"))
    bench.says(F1, control.Join(member(F1)))
    assert told(bench.tick()) == [(F0, True), (F1, True)]
    bench.now += 2 * LOOK_S
    assert told(bench.lost(S0)) == [(F0, False), (F1, False)], "requests are held, and as many as may wait"


def test_a_request_that_is_wrong_closes_nothing() -> None:
    bench = Bench(F0, D0, S0, num_ranks=1)
    assert told(bench.says(D0, admit("a", dp_rank=7))) == []
