"""Plans the drafted tokens that a step verifies behind each decode. Pure; used by batching.py."""

import hashlib
from array import array
from typing import TYPE_CHECKING

from meshlm.scheduler_proc.kv.cache import KVCache
from meshlm.scheduler_proc.plan import PlanBuilder

if TYPE_CHECKING:
    from meshlm.scheduler_proc.draft_budget import DraftBudget


def make_budget(max_rows: int, max_drafts: int) -> "DraftBudget | None":
    """None where nothing is drafted."""
    if not max_drafts:
        return None
    from meshlm.scheduler_proc.draft_budget import DraftBudget  # numpy, which schedulers without drafts do without

    return DraftBudget(max_rows, max_drafts)


def group_of(cache_salt: str) -> bytes:
    """NewRow.group: requests with different salts share no past answers, as they share no blocks."""
    return hashlib.sha256(cache_salt.encode()).digest()[:16] if cache_salt else b""


def plan_drafts(
    builder: PlanBuilder, kv: KVCache, budget: "DraftBudget", limits: tuple[int, int], token_s: float
) -> None:
    """Plans drafts of the decodes: as many as the budget chooses within tokens, length and free memory. Nobody is preempted for them.
    limits: tokens of the step, and lines of rows with drafts. token_s: what a token adds at least, in a step that will have prompts."""
    most_tokens, lines = limits
    rows = [request.row for request in builder.decodes]
    most = [  # behind the token at `start` comes the one that is sampled in any case
        request.max_len - start - 2
        if request.max_drafts is None
        else min(request.max_drafts, request.max_len - start - 2)
        for request, start in zip(builder.decodes, builder.decode_starts, strict=True)
    ]
    counts = budget.choose(rows, most, most_tokens - builder.num_tokens, token_s)
    for place, count in enumerate(counts):
        if not count:
            continue
        request = builder.decodes[place]
        start = builder.decode_starts[place]
        needed = min(start + 1 + count, start + lines)  # the last one that may be sampled is not computed
        if needed > request.capacity:
            needed = min(needed, kv.drafts_end(request))
            if (blocks := kv.grow(request, needed)) is not None:
                builder.grow(request.row, blocks)
            else:
                needed = request.capacity
        counts[place] = count = max(0, needed - start - 1)
        lines -= 1 + count if count else 0
        request.num_computed += count
        request.num_output_placeholders += count
    if num_drafts := sum(counts):
        builder.num_tokens += num_drafts
        builder.num_drafts = array("i", counts)
