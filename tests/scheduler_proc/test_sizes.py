"""A step's messages stay short enough for a frame, whatever the requests ask for; what does not fit comes in a later step."""

import msgspec
import pytest
from bench import COORDINATOR, DETOKENIZER, LIFE, WORKER, Bench, limits, reference

from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.edges.token import LogprobColumns, TokenDeltas
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_f32, pack_i32
from meshlm.protocol.wire.ids import FinishReason, Handle, Incarnation, RequestId
from meshlm.runtime.process.events import Received, Send
from meshlm.scheduler_proc import sizes
from meshlm.scheduler_proc.output import Output
from meshlm.scheduler_proc.request import Request

MOST = 20_000
encode = msgspec.msgpack.encode


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MAX_STEP_BYTES", MOST)
    monkeypatch.setattr(sizes, "MAX_START_BYTES", MOST)


class Sized(Bench):
    """Notes every plan."""

    def __init__(self) -> None:
        self.seen: list[StepPlan] = []
        self.messages: list[TokenDeltas] = []
        super().__init__(limits(), num_blocks=64, block_size=4)

    def take(self, sends: list[Send]) -> None:
        self.seen += [send.message for send in sends if isinstance(send.message, StepPlan)]
        self.messages += [send.message for send in sends if isinstance(send.message, TokenDeltas)]
        super().take(sends)

    def ask(self, params: SamplingParams) -> None:
        for handle in range(1, 9):
            work = EngineRequest(
                RequestId(f"r{handle}"), Handle(handle), pack_i32([handle, 2, 3, 4, 5]), params, arrival_s=handle
            )
            self.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))

    def check_all(self) -> None:
        self.finish()
        assert self.tokens == {handle: reference([handle, 2, 3, 4, 5], 4) for handle in range(1, 9)}


def test_long_lists_of_ids_begin_in_several_steps() -> None:
    """512 prompts with a bias for all the vocabulary made one plan of 300 MB."""
    bias = {70_000 + token: 0.1 for token in range(700)}
    bench = Sized()
    bench.ask(SamplingParams(max_tokens=4, logit_bias=bias, allowed_token_ids=tuple(range(70_000, 70_300))))
    assert len(encode(bench.seen[0].new_rows[0])) > MOST // 3
    bench.check_all()
    assert max(len(encode(plan)) for plan in bench.seen) < MOST + 1000
    assert [len(plan.new_rows) for plan in bench.seen if plan.new_rows] == [1] * 8


@pytest.mark.parametrize(("num_tokens", "num_plans"), [(48, 1), (1000, 2)])
def test_a_step_starts_a_bounded_part_of_many_prompts_that_are_cached(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, num_plans: int
) -> None:
    """4,000 choices of a few prompts were a plan of 256 long rows each step, for which all who decoded waited."""
    monkeypatch.undo()
    bench = Bench(
        limits(max_num_seqs=256, max_model_len=8192, max_num_batched_tokens=8192), num_blocks=2000, block_size=16
    )
    prompt, params = pack_i32([token % 50 for token in range(num_tokens)]), SamplingParams(max_tokens=1)
    bench.event(
        Received(
            COORDINATOR, LIFE, Assign(EngineRequest(RequestId("first"), Handle(1), prompt, params), DETOKENIZER, LIFE)
        )
    )
    bench.finish()
    for handle in range(2, 62):
        work = EngineRequest(RequestId(f"r{handle}"), Handle(handle), prompt, params, arrival_s=handle)
        bench.core.handle(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)), 1.0)
    plans: list[StepPlan] = []
    while sends := bench.core.plan(0):
        plans += [send.message for send in sends if isinstance(send.message, StepPlan)]
    assert sum(len(plan.new_rows) for plan in plans) == 60
    assert len(plans) == num_plans
    assert max(len(encode(plan)) for plan in plans) < sizes.MAX_START_BYTES * 1.1


def test_one_that_is_larger_than_the_limit_starts_alone() -> None:
    bench = Sized()
    bench.ask(SamplingParams(max_tokens=4, allowed_token_ids=tuple(range(70_000, 76_000))))
    bench.check_all()


def test_log_probabilities_bound_what_runs_together() -> None:
    """--max-logprobs -1 lets a request ask for the whole vocabulary's, in each step."""
    bench = Sized()
    params = SamplingParams(max_tokens=4, logprobs=1000)
    bench.ask(params)
    bench.check_all()
    assert max(len(ints(plan.rows)) for plan in bench.seen) == MOST // sizes.logprob_bytes(params) == 2


def test_log_probabilities_of_prompts_bound_a_steps_tokens() -> None:
    bench = Sized()
    params = SamplingParams(max_tokens=4, prompt_logprobs=1000)
    bench.ask(params)
    bench.check_all()
    for plan in bench.seen:
        starts = ints(plan.starts)
        counts = ints(plan.counts) or [1] * len(starts)
        of_prompts = sum(max(0, min(start + count, 4) - start) for start, count in zip(starts, counts, strict=True))
        assert of_prompts * sizes.prompt_logprob_bytes(params) <= MOST
    assert any(plan.counts for plan in bench.seen)


def test_rows_with_many_log_probabilities_make_several_messages() -> None:
    bench = Sized()
    bench.ask(SamplingParams(max_tokens=4, logprobs=500))
    bench.messages.clear()
    while bench.plans:
        plan = bench.plans.popleft()
        columns = LogprobColumns(500, pack_f32([-1.0]), pack_i32([1]), pack_i32([1] * 500), pack_f32([-1.0] * 500))
        result = bench.model.run(plan)
        details = dict.fromkeys(range(len(ints(plan.rows))), columns)
        bench.event(Received(WORKER, LIFE, msgspec.structs.replace(result, logprobs=details)))
    bench.check_all()
    told = [message for message in bench.messages if message.logprobs]
    assert sum(len(message.logprobs) for message in told) == 8 * 4
    assert max(len(encode(message)) for message in told) < MOST + 5000
    for message in told:
        assert len(message.logprobs) == len(ints(message.handles)), "a row without its own"


def test_details_of_one_row_stay_with_it() -> None:
    """Of several tokens of a request, too."""
    output = Output(0, 0)
    wide = MOST // 8 + 1
    columns = LogprobColumns(wide, *(pack_i32([1] * count) for count in (2, 2, 2 * wide, 2 * wide)))
    work = EngineRequest(RequestId("r"), Handle(1), pack_i32([9]), SamplingParams(), arrival_s=0.0)
    request = Request(work, DETOKENIZER, Incarnation(1), 64)
    box, row = output.add_details(request, 0, [7, 8], columns)
    assert (box, row) == (output.outbox_of(DETOKENIZER), 0)
    assert box.handles == [1]
    found = [message for _, message in output.messages(())]
    assert [(ints(message.starts), list(message.logprobs)) for message in found] == [([0], [0]), ([1], [0])]


def test_rows_that_could_not_be_sent_end_where_they_were() -> None:
    bench = Sized()
    bench.ask(SamplingParams(max_tokens=4))
    before = {handle: len(tokens) for handle, tokens in bench.tokens.items()}
    result = bench.model.run(bench.plans.popleft())
    (lost,) = [
        send.message
        for send in bench.core.handle(Received(WORKER, LIFE, result), 1.0)
        if isinstance(send.message, TokenDeltas)
    ]
    bench.take(bench.core.table.too_long(DETOKENIZER, lost, "too long"))
    ended = set(ints(lost.handles))
    assert ended
    assert bench.ended == dict.fromkeys(ended, FinishReason.ERROR)
    assert all(len(bench.tokens[handle]) == before.get(handle, 0) for handle in ended)
    bench.core.check()
    bench.finish()
    assert {bench.ended[handle] for handle in range(1, 9) if handle not in ended} <= {FinishReason.LENGTH}
