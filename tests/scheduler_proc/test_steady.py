"""Steady decodes: the columns say what the loops would have said."""

from array import array

import pytest

from meshlm.protocol.admit_edge import AbortRequests, Assign, Work
from meshlm.protocol.columns import ints, pack_i32
from meshlm.protocol.control_edge import GraphCounts
from meshlm.protocol.ids import Handle, Identity, Incarnation, RequestId, Role
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.step_edge import StepPlan, StepResult, WorkerReady, WorkerStats
from meshlm.protocol.token_edge import TokenDeltas
from meshlm.scheduler_proc.batching import Batching
from meshlm.scheduler_proc.core import Scheduler
from meshlm.scheduler_proc.events import Event, Limits, PeerUp, Received, Send, Tick

LIFE = Incarnation(1)
WORKER, COORDINATOR = Identity(Role.WORKER), Identity(Role.COORDINATOR)
DETOKENIZERS = [Identity(Role.DETOKENIZER, index) for index in range(2)]
STOP_ID, STOPS_AT = 5, 70


class Rank:
    """A scheduler with five requests of two detokenizers; result n brings token 100 * n + row, and once a stop token."""

    def __init__(self, num_blocks: int = 400) -> None:
        self.core = Scheduler(Limits(max_model_len=400, max_num_seqs=8, max_num_batched_tokens=64))
        self.told: list[tuple[Identity, list[int], list[int], list[int], int]] = []
        self.plans: list[StepPlan] = []
        self.num_steady = self.num_results = 0
        for peer in (*DETOKENIZERS, WORKER):
            self.event(PeerUp(peer, LIFE))
        self.says(WorkerReady(self.core.session, num_blocks, 4, 8, 64, 50000))
        for number in range(5):
            prompt = pack_i32(range(number, 2 * number + 3))
            params = SamplingParams(max_tokens=90 + number, stop_token_ids=(STOP_ID,) if number == 3 else ())
            work = Work(RequestId(f"r{number}"), Handle(number + 7), prompt, params, arrival_s=number)
            self.says(Assign(work, DETOKENIZERS[number % 2], LIFE), COORDINATOR)

    def says(self, message: object, sender: Identity = WORKER) -> None:
        self.event(Received(sender, LIFE, message))  # type: ignore[arg-type]

    def event(self, event: Event) -> None:
        self.note(self.core.handle(event, 0.0))
        self.core.check()

    def note(self, sends: list[Send]) -> None:
        for send in sends:
            if isinstance(told := send.message, TokenDeltas):
                self.told.append(
                    (send.to, ints(told.handles), ints(told.starts), ints(told.token_ids), len(told.ended))
                )

    def turn(self) -> bool:
        """Send plans and answer the oldest; False when nothing runs any more."""
        while sends := self.core.plan(0):
            self.core.check()
            self.plans += [send.message for send in sends if isinstance(send.message, StepPlan)]
        self.num_steady += self.core.batching.steady is not None
        if not self.plans:
            return False
        plan = self.plans.pop(0)
        self.num_results += 1
        rows = ints(plan.rows) if not plan.samples else [r for r, s in zip(ints(plan.rows), plan.samples) if s]
        tokens = array("i", [STOP_ID if self.num_results == STOPS_AT else 100 * self.num_results + row for row in rows])
        self.says(StepResult(session=plan.session, step=plan.step, token_ids=tokens.tobytes(), done_ns=1))
        return True


def story(rank: Rank) -> list[tuple[Identity, list[int], list[int], list[int], int]]:
    """Ticks, an abort and the ends of all."""
    turns = 0
    while rank.turn():
        turns += 1
        if turns % 17 == 0:
            rank.event(Tick(0.0))
        if turns == 40:
            rank.says(AbortRequests((RequestId("r1"),)), COORDINATOR)
    assert not rank.core.requests
    return rank.told


@pytest.mark.parametrize("num_blocks", [400, 80])  # the second preempts
def test_columns_tell_what_the_loops_tell(num_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batching, "fewest_steady", 10_000)
    loops = Rank(num_blocks)
    expected = story(loops)
    assert loops.num_steady == 0
    monkeypatch.setattr(Batching, "fewest_steady", 2)
    columns = Rank(num_blocks)
    assert story(columns) == expected
    assert columns.num_steady > 10
    assert columns.core.batching.pool._by_hash.keys() >= loops.core.batching.pool._by_hash.keys()


def test_columns_go_on_through_ticks_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batching, "fewest_steady", 2)
    rank = Rank()
    while rank.core.batching.steady is None:
        rank.turn()
    steady = rank.core.batching.steady
    rank.event(Tick(0.0))
    rank.turn()
    rank.says(WorkerStats(GraphCounts({"decode": 3})))
    rank.turn()
    assert rank.core.batching.steady is steady
