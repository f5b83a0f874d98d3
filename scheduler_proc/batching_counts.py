"""What /metrics says of a rank's queues, steps and prefix cache. Used by batching.py and io.py."""

from meshlm.runtime.process.counts import Counts
from meshlm.scheduler_proc.kv.cache import KVCache
from meshlm.scheduler_proc.request import Request
from meshlm.scheduler_proc.states import Wait


def count_misses(counts: Counts, kv: KVCache, request: Request) -> None:
    """Counts why tokens of a request that starts were not in the prefix cache, and which KV groups had fewer than others."""
    missing = len(request.tokens) - request.num_computed
    for reason, count in kv.missed(request).items():
        missing -= count
        counts.add("prefix_cache_miss_tokens", reason, count)
    if missing:
        counts.add("prefix_cache_miss_tokens", "unknown", missing)
    for group, count in kv.limited.items():
        counts.add("prefix_cache_limited_tokens", group, count)


def planned(counts: Counts, duration_ns: int) -> None:
    """A step was planned, which took so long."""
    counts.histograms["step_schedule_time_seconds"].observe(duration_ns / 1e9)


def outstanding_prefill(running: list[Request], waiting: list[Request]) -> int:
    """Prompt tokens that are not computed yet."""
    begun = (request for request in running if request.num_computed < request.num_prompt)
    left = sum(max(0, len(request.tokens) - request.num_computed) for request in begun)
    return left + sum(len(request.tokens) for request in waiting)


def gauge(counts: Counts, kv: KVCache, running: list[Request], waiting: list[Request]) -> None:
    gauges = counts.gauges
    deferred = sum(1 for r in waiting if r.waits in (Wait.EXTRAS, Wait.KV))
    gauges["num_requests_waiting_by_reason"] = {"capacity": len(waiting) - deferred, "deferred": deferred}
    gauges["kv_cache_blocks"] = kv.pool.states()
    gauges["kv_cache_group_blocks"], fragmentation = kv.usage(running)
    gauges["kv_cache_fragmentation_perc"] = {"": fragmentation}
