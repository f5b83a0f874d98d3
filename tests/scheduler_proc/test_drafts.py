"""Steps that give a row none, one or several tokens: the scheduler knows the most that a row can be, and plans on."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from bench import COORDINATOR, DETOKENIZER, LIFE, WORKER, Bench, Model, limits, reference

from meshlm.protocol.drafting import Drafting
from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.edges.token import LogprobColumns, TokenDeltas
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import FinishReason, Handle, RequestId
from meshlm.runtime.process.events import Received
from meshlm.scheduler_proc import sizes
from meshlm.scheduler_proc.output import position_columns

PROMPT = [5, 6, 7]


def test_the_tokens_are_the_same_in_fewer_steps() -> None:
    one, several = Bench(limits(), 32, 4), Bench(limits(), 32, 4, 3)
    for bench in (one, several):
        bench.assign(1, PROMPT, 60)
        bench.assign(2, [9], 33)
        bench.finish()
        assert bench.tokens == {1: reference(PROMPT, 60), 2: reference([9], 33)}
        assert set(bench.ended.values()) == {FinishReason.LENGTH}
    assert several.core.num_steps < one.core.num_steps * 0.8
    assert set(several.model.given) == {0, 1, 2, 3, 4}


def test_a_worker_without_a_drafter_is_sent_the_plans_of_before() -> None:
    bench = Bench(limits(), 32, 4)
    bench.assign(1, PROMPT, 9)
    bench.step()
    for plan in bench.plans:
        assert (plan.num_drafts, plan.counts, plan.num_tokens) == (b"", b"", 1)


def test_rows_with_equal_salts_are_one_group() -> None:
    bench = Bench(limits(), 64, 4, 3)
    groups: dict[int, bytes] = {}  # by row, in the order in which requests got them
    for name, salt in enumerate(["", "a", "b", "a"]):
        bench.assign(name, PROMPT, 40, cache_salt=salt)
        while len(groups) <= name:
            groups |= {row.row: row.group for plan in bench.plans for row in plan.new_rows}
            bench.step()
    none, a, b, again = groups.values()
    assert (none, a) == (b"", again)
    assert len({none, a, b}) == 3


@pytest.mark.parametrize("most", [0, 1, 9])
def test_a_request_has_no_more_drafts_than_it_wants(most: int) -> None:
    bench = Bench(limits(), 64, 4, 3)
    bench.assign(1, PROMPT, 40, extras=(Drafting(most),))
    bench.assign(2, [9], 20)
    drafts: dict[int, int] = {}  # row -> the most of a step
    while bench.plans:
        plan = bench.plans[0]
        for row, num in zip(ints(plan.rows), ints(plan.num_drafts), strict=False):
            drafts[row] = max(num, drafts.get(row, 0))
        bench.step()
    assert drafts == {0: min(most, 3), 1: 3}
    assert bench.tokens == {1: reference(PROMPT, 40), 2: reference([9], 20)}


def test_plans_of_a_pipeline_say_where_rows_are() -> None:
    """Each stage drafts by itself: a row is not planned again before it is known how many of its drafts were accepted."""
    bench = Bench(limits(num_stages=2), 64, 4, 3)
    requests = {1: (PROMPT, 29), 2: ([9], 20), 3: ([4, 4], 24)}
    for handle, (prompt, count) in requests.items():
        bench.assign(handle, prompt, count)
    bench.finish()
    assert bench.tokens == {handle: reference(prompt, count) for handle, (prompt, count) in requests.items()}
    assert max(bench.model.given) > 1


@pytest.mark.parametrize("place", range(3, 12))
def test_a_stop_token_in_the_middle_of_several_tokens_is_the_last(place: int) -> None:
    expected = reference(PROMPT, 40)
    bench = Bench(limits(), 32, 4, 3)
    bench.assign(1, PROMPT, 40, stop=(expected[place],))
    bench.finish()
    assert bench.tokens[1] == expected[: expected.index(expected[place]) + 1]
    assert bench.ended == {1: FinishReason.STOP}


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_never_more_than_max_tokens(max_tokens: int) -> None:
    bench = Bench(limits(max_model_len=13), 4, 4, 3)
    bench.assign(1, PROMPT, max_tokens)
    bench.finish()
    assert bench.tokens[1] == reference(PROMPT, min(max_tokens, 10))


def test_drafts_stay_within_the_step_s_tokens() -> None:
    bench = Bench(limits(max_num_batched_tokens=7), 64, 4, 3)
    for handle in range(1, 6):
        bench.assign(handle, [handle], 20)
    most = 0
    while bench.plans:
        most = max(most, bench.plans[0].num_tokens)
        bench.step()
    assert most == 7
    assert bench.tokens == {handle: reference([handle], 20) for handle in range(1, 6)}


@pytest.mark.parametrize("lines", [4, 6, 9])
def test_drafts_stay_within_the_worker_s_states(lines: int) -> None:
    """Of a step's requests with drafts it can keep so many lines apart."""
    model = Model(64, 4, max_drafts=3)
    model.max_draft_lines = lines
    bench = Bench(limits(), 64, 4, model=model)
    for handle in range(1, 6):
        bench.assign(handle, [handle], 20)
    most = 0
    while bench.plans:
        drafts = ints(bench.plans[0].num_drafts)
        most = max(most, sum(1 + count for count in drafts if count))
        bench.step()
    assert lines - 1 <= most <= lines, "a line alone has no draft"
    assert bench.tokens == {handle: reference([handle], 20) for handle in range(1, 6)}


def test_nobody_is_preempted_for_drafts() -> None:
    """Two requests that fill the cache exactly."""
    bench = Bench(limits(), 10, 4, 3)
    for handle in (1, 2):
        bench.assign(handle, [handle] * 4, 16)
    bench.finish()
    assert bench.core.batching.num_preemptions == 0
    assert bench.tokens == {handle: reference([handle] * 4, 16) for handle in (1, 2)}


def test_preempted_with_drafts_in_flight() -> None:
    bench = Bench(limits(), 32, 4, 3)
    bench.assign(1, PROMPT, 30)
    for _ in range(4):
        bench.step()
    (request,) = bench.core.requests.values()
    assert request.num_output_placeholders > 2
    bench.core.batching.preempt(request, "decode")
    bench.core.check()
    bench.finish()
    assert bench.tokens[1] == reference(PROMPT, 30)


def test_a_worker_that_dies_with_drafts_in_flight() -> None:
    bench = Bench(limits(), 32, 4, 3)
    bench.assign(1, PROMPT, 30)
    for _ in range(4):
        bench.step()
    bench.lose_worker()
    bench.finish()
    assert bench.tokens[1] == reference(PROMPT, 30)


def test_blocks_of_accepted_tokens_are_found_again() -> None:
    bench = Bench(limits(), 64, 4, 3)
    bench.assign(1, PROMPT, 30)
    bench.finish()
    bench.assign(2, PROMPT + reference(PROMPT, 30), 5)
    bench.finish()
    assert bench.cached[2] >= 28
    assert bench.tokens[2] == reference(PROMPT, 35)[30:]


class Timed(Bench):
    """Its steps take so long by their tokens."""

    def __init__(self, seconds: Callable[[int], float], num_blocks: int = 400) -> None:
        super().__init__(limits(max_model_len=1200), num_blocks, 4, 3)
        self._seconds = seconds
        self.num_drafts: list[int] = []  # of each step

    def step(self) -> None:
        plan = self.plans.popleft()
        self.num_drafts.append(sum(ints(plan.num_drafts)))
        duration_ns = int(self._seconds(plan.num_tokens) * 1e9)
        self.event(Received(WORKER, LIFE, msgspec.structs.replace(self.model.run(plan), gpu_ns=duration_ns)))


def test_drafts_that_cost_as_much_as_tokens_end() -> None:
    cheap, dear = Timed(lambda tokens: 0.01), Timed(lambda tokens: 0.01 * tokens)
    for bench in (cheap, dear):
        bench.assign(1, PROMPT, 1000)
        bench.finish()
        assert bench.tokens[1] == reference(PROMPT, 1000)
    assert sum(drafts == 3 for drafts in cheap.num_drafts) > 0.8 * len(cheap.num_drafts)
    assert sum(drafts > 0 for drafts in dear.num_drafts) < 0.05 * len(dear.num_drafts)


def test_estimates_are_of_the_request_and_not_of_its_row() -> None:
    bench = Timed(lambda tokens: 0.01)
    bench.assign(1, PROMPT, 100)
    bench.finish()
    assert (budget := bench.core.batching.drafts) is not None
    row = bench.core.batching._free_rows[-1]  # the next one
    assert budget.acceptance.gains(np.array([row])) != pytest.approx(budget.acceptance.gains(np.array([row - 1])))
    bench.assign(2, [9], 3)
    assert bench.core.requests[RequestId("r2")].row == row
    assert budget.acceptance.gains(np.array([row])) == pytest.approx(budget.acceptance.gains(np.array([row - 1])))


class WithLogprobs(Bench):
    """Its worker says of each sampled token the id, as its log-probability and its likeliest one."""

    def __init__(self) -> None:
        self.said: list[float] = []
        super().__init__(limits(), 64, 4, 3)

    def step(self) -> None:
        plan: StepPlan = self.plans.popleft()
        result = self.model.run(plan)
        (count,) = ints(result.counts) or [1]
        if plan.samples and not any(plan.samples):
            count = 0
        ids = np.frombuffer(result.token_ids, np.int32)
        columns = LogprobColumns(
            1, ids.astype(np.float32).tobytes(), ids.tobytes(), ids.tobytes(), b"\0" * len(ids) * 4
        )
        found = {0: columns} if count else {}
        self.event(Received(WORKER, LIFE, msgspec.structs.replace(result, logprobs=found)))

    def _deltas(self, deltas: TokenDeltas) -> None:
        super()._deltas(deltas)
        tokens = ints(deltas.token_ids)
        for row, columns in deltas.logprobs.items():
            assert ints(columns.top_ids) == ints(columns.ranks) == [tokens[row]]
            self.said += np.frombuffer(columns.logprobs, np.float32).tolist()


def test_log_probabilities_of_several_tokens() -> None:
    """Each with its token, and none of those behind a stop token."""
    expected = reference(PROMPT, 40)
    bench = WithLogprobs()
    sampling = SamplingParams(max_tokens=40, logprobs=1, stop_token_ids=(expected[30],))
    work = EngineRequest(RequestId("r1"), Handle(1), pack_i32(PROMPT), sampling)
    bench.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))
    bench.finish()
    assert bench.said == bench.tokens[1] == expected[:31]


def test_the_columns_of_one_position() -> None:
    columns = LogprobColumns(
        2, *(np.arange(n, dtype=t).tobytes() for n, t in ((3, "f4"), (3, "i4"), (6, "i4"), (6, "f4")))
    )
    one = position_columns(columns, 1)
    assert (ints(one.ranks), ints(one.top_ids)) == ([1], [2, 3])
    assert np.frombuffer(one.top_logprobs, np.float32).tolist() == [2, 3]


def test_a_step_s_log_probabilities_fit_into_a_frame_with_drafts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MAX_STEP_BYTES", 5 * sizes.logprob_bytes(SamplingParams(logprobs=1)))
    bench = Bench(limits(), 64, 4, 3)
    for handle in (1, 2):
        work = EngineRequest(RequestId(f"r{handle}"), Handle(handle), pack_i32([handle]), SamplingParams(logprobs=1))
        bench.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))
    assert len(bench.core.batching.running) == 1
    bench.finish()
    assert len(bench.ended) == 2
