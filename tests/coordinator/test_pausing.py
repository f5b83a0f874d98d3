"""The coordinator remembers that the mesh is paused, for schedulers that begin meanwhile; its next incarnation learns it from them."""

from coordinator_bench import F0, LIFE, S0, S1, WALL_S, Bench, load
from msgspec import Struct

from meshlm.coordinator.core import Coordinator
from meshlm.coordinator.lockstep import Lockstep
from meshlm.protocol.operations import Operation, OperationDone, OperationId, Pause, Resume
from meshlm.runtime.events import PeerLost, Received, Send, Tick


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


def test_a_pause_that_a_missing_rank_prevents_is_none() -> None:
    bench = Bench(F0, S0, num_ranks=2)
    (done,) = asks(bench, Pause())
    assert isinstance(done, OperationDone)
    assert "is not there" in done.error
    assert not bench.core.frontends.paused


def test_ranks_that_step_together_are_not_paused() -> None:
    core = Coordinator(10, 1, lockstep=Lockstep(1, 1))
    (send,) = core.handle(Received(F0, LIFE, Operation(OperationId("p"), Pause())), 0.0)
    assert isinstance(send.message, OperationDone)
    assert "step together" in send.message.error
