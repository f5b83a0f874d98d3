"""Plans the drafted tokens that a step verifies behind each decode. Pure; used by batching.py."""

import hashlib
from array import array
from typing import TYPE_CHECKING

from meshlm.scheduler_proc.kv.cache import KVCache
from meshlm.scheduler_proc.plan import PlanBuilder
from meshlm.scheduler_proc.request import Request

if TYPE_CHECKING:
    from meshlm.scheduler_proc.draft_budget import DraftBudget


GONE = -2  # in the place of a row: its request has ended


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
    for place, (request, start, count) in enumerate(zip(builder.decodes, builder.decode_starts, counts, strict=True)):
        if not count:
            continue
        if count >= lines or start + 1 + count > request.capacity:
            counts[place] = count = _fitted(builder, kv, request, start, min(count, lines - 1))
            if not count:
                continue
        lines -= 1 + count
        request.num_computed += count
        request.num_output_placeholders += count
    if num_drafts := sum(counts):
        builder.num_tokens += num_drafts
        builder.num_drafts = array("i", counts)


def _fitted(builder: PlanBuilder, kv: KVCache, request: Request, start: int, count: int) -> int:
    """So many of the `count` drafts behind the token at `start` as have blocks, or get some. The last token that may be sampled is not
    computed."""
    needed = start + 1 + max(0, count)
    if needed > request.capacity:
        needed = min(needed, kv.drafts_end(request))
        if (blocks := kv.grow(request, needed)) is None:
            needed = request.capacity
        else:
            builder.grow(request.row, blocks)
    return max(0, needed - start - 1)
