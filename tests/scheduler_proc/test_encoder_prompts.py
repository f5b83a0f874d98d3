"""Prompts of encoders are computed in one step each, as many in a step as its tokens allow, and hold no block."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshlm.protocol.edges.admit import EngineRequest
from meshlm.protocol.edges.step import WorkerReady
from meshlm.protocol.kv import EncoderOnly
from meshlm.protocol.pool import Pool, PoolKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, RequestId, Role, StepId
from meshlm.scheduler_proc.batching import Batching
from meshlm.scheduler_proc.limits import Limits
from meshlm.scheduler_proc.request import Request
from meshlm.scheduler_proc.states import RequestState

LONGEST, ROWS = 64, 5
LIMITS = Limits(
    max_model_len=LONGEST,
    max_num_seqs=ROWS,
    max_num_batched_tokens=LONGEST,
    chunked_prefill=False,
    prefix_caching=False,
)


@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=20))
def test_no_prompt_is_split(lengths: list[int]) -> None:
    specs, kinds = (EncoderOnly(),), tuple(PoolKind)
    facts = WorkerReady(1, 0, 16, ROWS, LONGEST, 99, kv_specs=specs, pool_kinds=kinds, pooled_bytes=8)
    batching = Batching(LIMITS, facts)
    requests = []
    for number, length in enumerate(lengths):
        ids, handle, extras = pack_i32([7] * length), Handle(number), (Pool(PoolKind.MEAN),)
        work = EngineRequest(RequestId(str(number)), handle, ids, SamplingParams(), arrival_s=number, extras=extras)
        requests.append(Request(work, Identity(Role.DETOKENIZER, 0), Incarnation(1), LONGEST))
        batching.enqueue(requests[-1])
    computed: list[int] = []
    num_steps = 0
    while batching.waiting or batching.running:
        num_steps += 1
        planned = batching.plan(1, StepId(num_steps), 0)
        assert planned is not None
        plan, record = planned
        batching.check()
        assert not any(np.frombuffer(plan.starts, np.int32))
        assert not plan.block_rows
        counts = np.frombuffer(plan.counts, np.int32).tolist() if plan.counts else [1] * len(record.batch)
        assert counts == [request.num_prompt for request in record.batch]
        assert plan.num_tokens == sum(counts) <= LONGEST
        assert all(not new.block_ids for new in plan.new_rows)
        computed += sorted(int(request.work.request_id) for request in record.batch)
        if batching.waiting and len(counts) < ROWS:
            assert sum(counts) + batching.waiting[0].num_prompt > LONGEST, "the next one had room"
        for request in record.batch:
            batching.remove(request)
            request.move(RequestState.FINISHED)
    assert computed == list(range(len(lengths))), "in the order in which they came"
