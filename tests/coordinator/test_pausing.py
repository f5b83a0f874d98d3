"""The coordinator remembers that the mesh is paused, for schedulers that begin meanwhile; its next incarnation learns it from them."""

from coordinator_bench import F0, LIFE, S0, S1, WALL_S, Bench, load
from msgspec import Struct

from meshlm.coordinator.core import Coordinator
from meshlm.coordinator.joint import JointGroup
from meshlm.coordinator.operations import HOLD_S
from meshlm.protocol.edges.admit import Welcome
from meshlm.protocol.edges.control import SetRanks
from meshlm.protocol.operations import Operation, OperationDone, OperationId, Pause, Resume, limit_s
from meshlm.protocol.sleeping import AWAKE, TAGS, Sleeping
from meshlm.protocol.wire.ids import HEAD, Incarnation
from meshlm.runtime.process.events import PeerLost, Received, Send, Tick


def paused_at(bench: Bench) -> list[Send]:
    """What a tick asks schedulers for."""
    sends = bench.event(Tick(WALL_S))
    return [send for send in sends if isinstance(send.message, Operation)]


def asks(bench: Bench, action: Pause | Resume, name: str = "p") -> list[Struct]:
    return [send.message for send in bench.says(F0, Operation(OperationId(name), action))]


def test_a_scheduler_that_begins_in_a_paused_mesh_is_paused() -> None:
    bench = Bench(F0, S0, S1, num_ranks=2)
    assert asks(bench, Pause()) == [Operation(OperationId("p"), Pause())] * 2
    for rank in (S0, S1):
        bench.says(rank, load(paused=True))
    assert paused_at(bench) == []
    bench.event(PeerLost(S1, LIFE))
    bench.join(S1, 2)
    bench.says(S1, load(), 2)
    (late,) = paused_at(bench)
    assert (late.to, late.message.action) == (S1, Pause())  # type: ignore[attr-defined]
    assert bench.core.frontends.paused
    asks(bench, Resume(), "r")
    assert not bench.core.frontends.paused
    assert paused_at(bench) == []


def test_the_next_coordinator_learns_it() -> None:
    bench = Bench(F0, num_ranks=2)
    for rank, paused in ((S0, True), (S1, False)):
        bench.join(rank)
        bench.says(rank, load(paused=paused))
    assert bench.core.frontends.paused
    assert [send.to for send in paused_at(bench)] == [S1]


def test_the_next_coordinator_is_asked_to_resume_before_all_have_said_that_they_are_paused() -> None:
    bench = Bench(F0, num_ranks=2)
    bench.join(S0)
    bench.says(S0, load(paused=True))
    assert asks(bench, Resume()) == [], "the other rank is not there yet"
    assert any(isinstance(send.message, Operation) for send in bench.join(S1))
    bench.says(S1, load(paused=True))  # said before it heard of it
    assert not bench.core.frontends.paused
    bench.says(S0, load())
    bench.says(S1, load())
    assert paused_at(bench) == []


def test_a_pause_waits_for_a_missing_rank() -> None:
    bench = Bench(F0, S0, num_ranks=2)
    assert asks(bench, Pause()) == []
    assert not bench.core.frontends.paused
    sends = bench.join(S1)
    assert [send.to for send in sends if isinstance(send.message, Operation)] == [S0, S1]
    assert bench.core.frontends.paused


def test_a_pause_that_a_missing_rank_prevents_is_none() -> None:
    bench = Bench(F0, S0, num_ranks=2)
    assert asks(bench, Pause()) == []
    (done,) = [send.message for send in bench.tick(HOLD_S) if isinstance(send.message, OperationDone)]
    assert "scheduler/1 is not there" in done.error
    assert not bench.core.frontends.paused


def test_a_resume_in_the_moment_of_a_death_is_done_by_the_next_scheduler() -> None:
    bench = Bench(F0, S0, S1, num_ranks=2)
    asks(bench, Pause())
    for rank in (S0, S1):
        bench.says(rank, load(paused=True))
    bench.event(PeerLost(S1, LIFE))
    assert asks(bench, Resume(), "r") == []
    assert bench.core.frontends.paused
    asked = [(send.to, send.message.id) for send in bench.join(S1, 2) if isinstance(send.message, Operation)]
    assert asked == [(S1, "p"), (S0, "r"), (S1, "r")], "nor has the pause been answered, which comes first"
    assert not bench.core.frontends.paused
    bench.says(S1, load(), 2)
    assert paused_at(bench) == []


def welcomes(sends: list[Send]) -> list[Sleeping]:
    return [send.message.sleeping for send in sends if isinstance(send.message, Welcome)]


def test_a_scheduler_hears_that_its_workers_slept() -> None:
    """Whatever died with the one before: it begins no session before it knows."""
    asleep = Sleeping(TAGS, 2)
    bench = Bench(F0, num_ranks=2)
    bench.core.sleep_mode = True
    assert welcomes(bench.join(S0)) == welcomes(bench.join(S0)) == [AWAKE]
    bench.says(S0, load(serving=False))
    bench.says(S0, load(serving=False, sleeping=asleep))
    assert bench.core.frontends.asleep
    bench.event(PeerLost(S0, LIFE))
    assert bench.core.frontends.asleep, "requests that wait for it to wake up do not end"
    assert welcomes(bench.join(S0, 2)) == [asleep]
    bench.says(S0, load(serving=False), 2)  # said before it had heard that
    bench.event(PeerLost(S0, Incarnation(2)))
    assert welcomes(bench.join(S0, 3)) == [asleep]
    bench.says(S0, load(), 3)
    assert not bench.core.frontends.asleep
    bench.event(PeerLost(S0, Incarnation(3)))
    assert welcomes(bench.join(S0, 4)) == [AWAKE]


def test_a_rank_that_is_removed_in_its_sleep_comes_back_awake() -> None:
    bench = Bench(F0, S0, S1, num_ranks=2)
    bench.core.sleep_mode = True
    bench.says(S1, load(serving=False, sleeping=Sleeping(TAGS, 1)))
    bench.says(HEAD, SetRanks(1))
    bench.event(PeerLost(S1, LIFE))
    bench.says(HEAD, SetRanks(2))
    assert welcomes(bench.join(S1, 2)) == [AWAKE]


def test_no_scheduler_is_told_where_none_sleeps() -> None:
    assert welcomes(Bench(F0, num_ranks=2).join(S0)) == []


def test_a_pause_for_which_ranks_never_rest_is_refused() -> None:
    """Ranks that step together, of which one hangs; what others wait for is not done by some."""
    core = Coordinator(10, 1, lockstep=JointGroup(1, 1))
    pause = Operation(OperationId("p"), Pause())
    assert core.handle(Received(F0, LIFE, pause), 0.0) == [], "it has not heard of the rank"
    (send,) = [send for send in core.handle(Tick(WALL_S), limit_s(pause.action)) if send.to == F0]
    assert send.message == OperationDone(pause.id, "ranks that step together did not rest in 120 s")
    assert not core.frontends.paused
