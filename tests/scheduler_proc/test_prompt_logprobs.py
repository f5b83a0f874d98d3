"""Log-probabilities of prompts come once, although what was computed is lost."""

import msgspec
import numpy as np
import pytest
from bench import COORDINATOR, DETOKENIZER, LIFE, WORKER, Bench, limits

from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.edges.token import LogprobColumns, TokenDeltas
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, RequestId
from meshlm.runtime.process.events import Received


class OfPrompts(Bench):
    """Its worker says of each prompt token the position, as its log-probability."""

    def __init__(self) -> None:
        self.of_prompts: list[list[float]] = []
        super().__init__(limits(max_num_batched_tokens=4), 64, 4)
        sampling = SamplingParams(max_tokens=3, prompt_logprobs=0)
        work = EngineRequest(RequestId("r1"), Handle(1), pack_i32(range(10)), sampling)
        self.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))

    def step(self) -> None:
        plan = self.plans.popleft()
        starts = np.frombuffer(plan.starts, np.int32)
        counts = np.frombuffer(plan.counts, np.int32) if plan.counts else np.ones(len(starts), np.int32)
        found = {}
        for place, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
            after = np.arange(start + 1, min(start + count + 1, 10), dtype=np.float32)
            if len(after):
                found[place] = LogprobColumns(0, after.tobytes(), after.astype(np.int32).tobytes(), b"", b"")
        result = msgspec.structs.replace(self.model.run(plan), prompt_logprobs=found)
        self.event(Received(WORKER, LIFE, result))

    def _deltas(self, deltas: TokenDeltas) -> None:
        super()._deltas(deltas)
        self.of_prompts += [np.frombuffer(one.logprobs, np.float32).tolist() for one in deltas.prompt_logprobs.values()]


@pytest.mark.parametrize("num_before", [0, 1, 2])
@pytest.mark.parametrize("reason", ["preemption", "death"])
def test_prompt_logprobs_of_a_prompt_that_begins_anew(reason: str, num_before: int) -> None:
    """One for each token, whatever chunks were computed before, or are on their way."""
    bench = OfPrompts()
    for _ in range(num_before):
        bench.step()
    if reason == "death":
        bench.lose_worker()
    else:
        (request,) = bench.core.requests.values()
        bench.core.batching.preempt(request, "decode")
    bench.finish()
    assert bench.of_prompts == [list(range(1, 10))]
