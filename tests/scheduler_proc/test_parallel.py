"""The scheduler of several workers: a pipeline's steps alternate; a group is made anew when it may be stuck."""

from msgspec import Struct

from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.edges.step import LastPlan, Reset, ResetGroup, StepPlan, StepResult, WorkerReady
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.events import PeerLost, PeerUp, Received, Send
from meshlm.scheduler_proc.core import Scheduler
from meshlm.scheduler_proc.limits import Limits

COORDINATOR, DETOKENIZER = Identity(Role.COORDINATOR), Identity(Role.DETOKENIZER)
WORKERS = [Identity(Role.WORKER, index) for index in (4, 5, 6, 7)]
LIFE = Incarnation(1)


def scheduler(num_workers: int = 4, **changes: int) -> Scheduler:
    limits = Limits(
        max_model_len=128,
        max_num_seqs=64,
        max_num_batched_tokens=64,
        num_workers=num_workers,
        first_worker=4,
        **changes,  # type: ignore[arg-type]
    )
    return Scheduler(limits)


def messages(sends: list[Send], kind: type[Struct]) -> dict[Identity, Struct]:
    return {send.to: send.message for send in sends if isinstance(send.message, kind)}


def all_up(core: Scheduler, incarnation: int = 1) -> Reset:
    """All workers come; the Reset that they get."""
    for worker in WORKERS[:-1]:
        assert not messages(core.handle(PeerUp(worker, Incarnation(incarnation)), 1.0), Reset)
    sends = core.handle(PeerUp(WORKERS[-1], Incarnation(incarnation)), 1.0)
    resets = messages(sends, Reset)
    assert set(resets) == set(WORKERS)
    reset = resets[WORKERS[0]]
    assert isinstance(reset, Reset)
    assert reset.incarnations == (incarnation,) * 4
    return reset


def answer(core: Scheduler, reset: Reset, last: tuple[int, int] = (0, 0)) -> None:
    for index, worker in enumerate(WORKERS):
        core.handle(Received(worker, LIFE, LastPlan(reset.session, *last)), 1.0)
        core.handle(Received(worker, LIFE, WorkerReady(reset.session, 100 - index, 4, 64, 64, 99)), 1.0)


def test_a_group_begins_when_all_its_workers_can_be_reached() -> None:
    core = scheduler()
    answer(core, all_up(core))
    assert core.serving
    assert core.batching.kv.pool.num_blocks == 97, "as many blocks as the worker with the fewest has"


def test_a_lost_worker_disbands_the_group() -> None:
    core = scheduler()
    answer(core, all_up(core))
    sends = core.handle(PeerLost(WORKERS[2], LIFE), 2.0)
    assert set(messages(sends, ResetGroup)) == set(WORKERS) - {WORKERS[2]}
    assert not core.serving
    for worker in (WORKERS[0], WORKERS[1], WORKERS[3]):
        core.handle(PeerLost(worker, LIFE), 2.0)
    all_up(core, incarnation=2)


def test_one_worker_alone_is_no_group() -> None:
    core = scheduler(num_workers=1)
    (reset,) = messages(core.handle(PeerUp(WORKERS[0], LIFE), 1.0), Reset).values()
    assert reset == Reset(1_000_000)
    assert not messages(core.handle(PeerLost(WORKERS[0], LIFE), 1.0), ResetGroup)


def test_workers_that_were_sent_different_plans_are_disbanded() -> None:
    """An earlier scheduler died between sending a plan to one and to the next."""
    core = scheduler()
    reset = all_up(core)
    for worker in WORKERS[:3]:
        assert not messages(core.handle(Received(worker, LIFE, LastPlan(reset.session, 5, 17)), 1.0), ResetGroup)
    sends = core.handle(Received(WORKERS[3], LIFE, LastPlan(reset.session, 5, 16)), 1.0)
    assert set(messages(sends, ResetGroup)) == set(WORKERS)
    for worker in WORKERS:
        core.handle(Received(worker, LIFE, WorkerReady(reset.session, 100, 4, 64, 64, 99)), 1.0)
    assert not core.serving, "their answers to a session that is over"


def test_equal_standings_go_on() -> None:
    core = scheduler()
    answer(core, all_up(core), last=(5, 17))
    assert core.serving


def test_steps_of_a_pipeline_alternate() -> None:
    """Two stages: two steps are in flight, each with half of the requests, and no request in both."""
    core = scheduler(num_stages=2)
    core.handle(PeerUp(DETOKENIZER, LIFE), 1.0)
    answer(core, all_up(core))
    for number in range(10):
        sampling = SamplingParams(max_tokens=20)
        work = EngineRequest(
            RequestId(f"r{number}"), Handle(number), pack_i32([number, 7]), sampling, arrival_s=float(number)
        )
        core.handle(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)), 1.0)
    plans: list[StepPlan] = []
    sizes: list[int] = []
    for _ in range(12):
        while sends := core.plan(0):
            plan = messages(sends, StepPlan)[WORKERS[0]]
            assert isinstance(plan, StepPlan)
            assert set(messages(sends, StepPlan)) == set(WORKERS), "all stages and ranks get each plan"
            plans.append(plan)
        assert len(plans) <= 2
        rows = [row for plan in plans for row in ints(plan.rows)]
        assert len(rows) == len(set(rows)), "a request in two steps at a time"
        plan = plans.pop(0)
        sizes.append(len(ints(plan.rows)))
        result = StepResult(plan.session, plan.step, pack_i32([3] * sizes[-1]), done_ns=1)
        core.handle(Received(WORKERS[2], LIFE, result), 1.0)
        core.check()
    assert sizes[4:] == [5] * 8
