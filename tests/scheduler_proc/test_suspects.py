"""Who is blamed when a worker dies or a step fails: the request that does it, never one that shared a step with it."""

import contextlib
import random

import pytest
from bench import COORDINATOR, DETOKENIZER, LIFE, WORKER, Bench, Model, reference

from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.edges.step import Reset, StepFailed, StepPlan, StepResult
from meshlm.protocol.edges.token import TokenDeltas
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, RequestId
from meshlm.runtime.process.events import Received, Send
from meshlm.scheduler_proc.limits import Limits

POISON = 990  # the first token of a prompt that kills


class Killed(Exception):
    """The worker would be dead now."""


class Mortal(Model):
    """Dies of a row of the poison's once that has `at` tokens."""

    at = 0

    def fresh(self) -> "Mortal":
        model = Mortal(self.num_blocks, self.block_size, self.pipeline, self.max_drafts)
        model.at = self.at
        return model

    def run(self, plan: StepPlan) -> StepResult:
        before = {row: len(tokens) for row, (tokens, _) in self.rows.items()}
        before |= {new.row: len(ints(new.token_ids)) for new in plan.new_rows}
        result = super().run(plan)
        if any(self.rows[row][0][0] == POISON and before[row] >= self.at for row in ints(plan.rows)):
            raise Killed
        return result


class Ward(Bench):
    """A bench whose worker dies, or whose steps fail, as the poison wants it."""

    def __init__(self, limits: Limits, num_blocks: int, at: int, *, dies: bool) -> None:
        model = Mortal(num_blocks, 4)
        model.at = at
        self.num_faults = 0
        self._dies = dies
        self.kinds: dict[int, ErrorKind] = {}
        super().__init__(limits, num_blocks, 4, model=model)

    def take(self, sends: list[Send]) -> None:
        for send in sends:
            if isinstance(send.message, Reset):  # the worker goes through the plans that it has
                self._finish_plans()
            if isinstance(send.message, TokenDeltas):
                handles = ints(send.message.handles)
                self.kinds.update((handles[end.row], end.kind) for end in send.message.ended if end.message)
        super().take(sends)

    def step(self) -> None:
        """Two steps in flight are launched before the first one's result is there: that the second fails is told first."""
        launched: list[StepResult] = []
        for _ in range(min(2, len(self.plans))):
            plan = self.plans.popleft()
            try:
                launched.append(self.model.run(plan))
            except Killed:
                self.num_faults += bool(
                    self.core.requests
                )  # the step behind it, in flight already, is nobody's any more
                self._fault(plan)
                break
        for result in launched:
            self.event(Received(WORKER, LIFE, result))

    def _fault(self, plan: StepPlan) -> None:
        if self._dies:
            self.lose_worker()
            return
        self.directory.spoil()
        self.event(Received(WORKER, LIFE, StepFailed(plan.session, plan.step, "a row's parameters")))

    def _finish_plans(self) -> None:
        while self.plans:
            with contextlib.suppress(Killed):
                self.model.run(self.plans.popleft())

    def assign_again(self, handle: int) -> None:
        work = EngineRequest(RequestId(f"r{handle}"), Handle(handle), pack_i32([handle]), SamplingParams(max_tokens=4))
        self.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))


def limits(max_num_seqs: int = 8, async_depth: int = 2) -> Limits:
    return Limits(max_model_len=64, max_num_seqs=max_num_seqs, max_num_batched_tokens=40, async_depth=async_depth)


@pytest.mark.parametrize(("dies", "faults"), [(True, 2), (False, 1)])
def test_a_poison_that_is_alone(dies: bool, faults: int) -> None:
    """Two deaths of the worker, where the first may be anybody's doing; one failed step, which is the request's own."""
    ward = Ward(limits(), 64, 5, dies=dies)
    ward.assign(1, [POISON, 2, 3], 20)
    ward.finish()
    assert (ward.ended, ward.num_faults) == ({1: FinishReason.ERROR}, faults)
    assert ward.tokens[1] == reference([POISON, 2, 3], 20)[: len(ward.tokens[1])]
    assert ward.kinds[1] is (ErrorKind.POISON if dies else ErrorKind.INTERNAL)
    ward.assign_again(2)
    ward.finish()
    assert ward.tokens[2] == reference([2], 4)


@pytest.mark.parametrize("seed", range(400))
def test_poisons_among_others_end_alone(seed: int) -> None:
    """Whoever shares its steps gets each token once, and finishes; each poison costs three deaths of a worker at most, or two steps."""
    dice = random.Random(seed)
    dies, at, where = dice.random() < 0.5, dice.randint(3, 12), dice.sample(range(1, 13), dice.randint(1, 3))
    ward = Ward(limits(max_num_seqs=dice.randint(1, 8), async_depth=dice.randint(1, 3)), 96, at, dies=dies)
    asked = {}
    for handle in range(1, 13):
        prompt = [POISON, 1, 2] if handle in where else [dice.randrange(900) for _ in range(dice.randint(1, 12))]
        asked[handle] = (prompt, 12 if handle in where else dice.randint(1, 12))
        ward.assign(handle, *asked[handle])
        for _ in range(dice.randint(0, 2)):
            if ward.plans:
                ward.step()
    ward.finish()
    assert ward.num_faults <= (3 if dies else 2) * len(where)
    for handle, (prompt, count) in asked.items():
        got = ward.tokens.get(handle, [])
        if handle in where:
            assert ward.ended[handle] is FinishReason.ERROR
            assert got == reference(prompt, count)[: len(got)]
        else:
            assert (ward.ended[handle], got) == (FinishReason.LENGTH, reference(prompt, count))
