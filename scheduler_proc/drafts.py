"""How many drafted tokens a step verifies behind each decode. Pure; used by batching.py."""

from array import array

from meshlm.scheduler_proc.kv.cache import KVCache
from meshlm.scheduler_proc.plan import PlanBuilder


def plan_drafts(builder: PlanBuilder, kv: KVCache, max_drafts: int, most_tokens: int) -> None:
    """Plans drafts of the decodes: as many as budget, length and free memory allow. Nobody is preempted for them."""
    left = most_tokens - builder.num_tokens
    for request in builder.decodes:
        virtual = len(request.tokens) + request.num_output_placeholders
        most = max_drafts if request.max_drafts is None else min(max_drafts, request.max_drafts)
        count = min(most, request.max_len - virtual, left)
        needed = virtual + count - 1  # the last one that may be sampled is not computed
        if needed > request.capacity:
            if (blocks := kv.grow(request, needed)) is not None:
                builder.grow(request.row, blocks)
            else:
                count -= needed - request.capacity
        builder.num_drafts.append(count)
        left -= count
        request.num_computed += count
        request.num_output_placeholders += count
    num_drafts = sum(builder.num_drafts)
    builder.num_tokens += num_drafts
    if not num_drafts:
        builder.num_drafts = array("i")
