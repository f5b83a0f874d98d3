"""Operations go to the workers between two plans, and again with each session until all have answered."""

from bench import COORDINATOR, LIFE, WORKER, Bench, limits, reference
from msgspec import Struct

from meshlm.protocol.edges.step import Reset, WorkerReady
from meshlm.protocol.operations import (
    CallWorkers,
    Operation,
    OperationDone,
    OperationId,
    Profile,
    ReceiveWeights,
    ResetPrefixCache,
    Stop,
)
from meshlm.protocol.weights import WeightsVersion
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.runtime.process.events import PeerLost, PeerUp, Received, Send
from meshlm.scheduler_proc.core import Scheduler

TRACE = Operation(OperationId("t"), Profile(True))
DONE = OperationDone(TRACE.id)


def received(scheduler: Scheduler, sender: Identity, message: Struct) -> list[Send]:
    return scheduler.handle(Received(sender, LIFE, message), 1.0)


def reset(bench: Bench, *, preempt: bool = False) -> bool:
    """Ask for it as the coordinator does; whether the workers were asked."""
    sends = received(bench.core, COORDINATOR, Operation(OperationId("r"), ResetPrefixCache(preempt)))
    if [send.to for send in sends] == [WORKER]:
        bench.directory.reset_prefix_cache()
        told = received(bench.core, WORKER, OperationDone(OperationId("r")))
        assert told == [Send(COORDINATOR, OperationDone(OperationId("r")))]
        return True
    (send,) = sends
    assert isinstance(send.message, OperationDone)
    assert "requests run" in send.message.error
    return False


def test_later_requests_find_nothing_of_before() -> None:
    bench, prompt = Bench(limits(), 64, 4), list(range(40))
    bench.assign(1, prompt, 5)
    bench.finish()
    bench.assign(2, prompt, 5)
    bench.finish()
    assert bench.cached[2] == 36
    assert reset(bench)
    assert bench.directory.columns() == (b"", b""), "nor does the next scheduler"
    bench.assign(3, prompt, 5)
    bench.finish()
    assert bench.cached[3] == 0
    assert bench.tokens[3] == reference(prompt, 5)


def test_it_fails_while_requests_run_or_computes_them_anew() -> None:
    bench, prompt = Bench(limits(), 64, 4), list(range(40))
    bench.assign(1, prompt, 20)
    for _ in range(5):
        bench.step()
    assert not reset(bench)
    before = bench.core.load.prompt_tokens
    assert reset(bench, preempt=True)
    bench.core.check()
    bench.finish()
    assert bench.core.load.prompt_tokens >= before + len(prompt)
    assert bench.tokens[1] == reference(prompt, 20)


def test_what_was_computed_before_a_worker_extension_was_called_is_found_by_nobody() -> None:
    """Its method may have changed the weights. Nor is it found what a running request computes on top of its older tokens."""
    bench, prompt = Bench(limits(), 64, 4), list(range(40))
    call = Operation(OperationId("c"), CallWorkers("scale", b"{}"))
    bench.assign(1, prompt, 30)
    for _ in range(5):
        bench.step()
    assert received(bench.core, COORDINATOR, call) == [Send(WORKER, call)]
    assert bench.core.plan(1) == [], "no step before it is known what the method has changed"
    assert received(bench.core, WORKER, OperationDone(call.id)) == [Send(COORDINATOR, OperationDone(call.id))]
    bench.directory.reset_prefix_cache()
    bench.core.check()
    bench.finish()
    assert bench.directory.columns() == (b"", b"")
    again = prompt + bench.tokens[1]
    bench.assign(2, again, 2)
    bench.finish()
    bench.assign(3, again, 2)
    bench.finish()
    assert (bench.cached[2], bench.cached[3]) == (0, 68)


def test_it_waits_for_workers_and_is_done_again_after_a_death() -> None:
    scheduler = Scheduler(limits(num_workers=2))
    one, two = scheduler.workers.all
    assert received(scheduler, COORDINATOR, TRACE) == [], "no worker is there"

    def begin(*lives: Identity) -> list[Send]:
        for worker in lives:
            sends = scheduler.handle(PeerUp(worker, LIFE), 1.0)
        session = next(send.message.session for send in sends if isinstance(send.message, Reset))
        ready = WorkerReady(session, 8, 4, 64, 64, 997)
        return [send for worker in (one, two) for send in received(scheduler, worker, ready)]

    assert begin(one, two) == [Send(one, TRACE), Send(two, TRACE)]
    assert received(scheduler, one, DONE) == []
    scheduler.handle(PeerLost(two, LIFE), 1.0)
    assert received(scheduler, one, DONE) == [], "its answer counts in the next session"
    assert begin(two) == [Send(one, TRACE), Send(two, TRACE)]
    assert received(scheduler, two, DONE) == []
    assert received(scheduler, one, OperationDone(TRACE.id, "no room")) == [
        Send(COORDINATOR, OperationDone(TRACE.id, "no room"))
    ]
    assert scheduler.operations.pending == {}
    assert received(scheduler, Identity(Role.WORKER), DONE) == []


def test_after_a_stop_nothing_is_planned() -> None:
    """What was planned before is computed and told; its workers answer behind it."""
    bench, stop = Bench(limits(), 64, 4), Operation(OperationId("s"), Stop())
    bench.assign(1, [1, 2, 3], 20)
    for _ in range(3):
        bench.step()
    known, in_flight = len(bench.tokens[1]), len(bench.plans)
    assert in_flight
    assert received(bench.core, COORDINATOR, stop) == [Send(WORKER, stop)]
    for _ in range(in_flight):
        bench.step()
    assert len(bench.tokens[1]) == known + in_flight
    assert (len(bench.plans), bench.core.plan(0)) == (0, [])
    assert received(bench.core, WORKER, OperationDone(stop.id)) == [Send(COORDINATOR, OperationDone(stop.id))]
    bench.assign(2, [1, 2, 3], 20)
    assert (len(bench.plans), bench.core.plan(0)) == (0, [])
    bench.core.check()


def test_a_stop_does_not_wait_for_workers_that_are_not_there() -> None:
    stop = Operation(OperationId("s"), Stop())
    told = received(Scheduler(limits()), COORDINATOR, stop)
    assert told == [Send(COORDINATOR, OperationDone(stop.id))]


def test_what_all_do_together_with_a_trainer_is_over_with_the_first_that_fails_or_dies() -> None:
    for dies in (False, True):
        bench = Bench(limits(), 64, 4)
        asked = Operation(OperationId("w"), ReceiveWeights("/memory/a", 0, b"{}", WeightsVersion()))
        assert received(bench.core, COORDINATOR, asked) == [Send(WORKER, asked)]
        if dies:
            told = bench.core.handle(PeerLost(WORKER, LIFE), 2.0)
        else:
            told = received(bench.core, WORKER, OperationDone(asked.id, "no room"))
        (error,) = (send.message.error for send in told if isinstance(send.message, OperationDone))
        assert error.startswith("a worker was lost" if dies else "no room")
        assert received(bench.core, WORKER, OperationDone(asked.id)) == [], "nobody waits for it"
