"""The store's part of a snapshot, of the counts that it tells (docs/metrics.md). Pure; called by snapshot.py."""

from collections.abc import Iterable

from meshlm.protocol.counts import CountsOf, ProcessCounts
from meshlm.protocol.dashboard import StoreView, TierView
from meshlm.protocol.wire.ids import Role


def stores(counts: Iterable[CountsOf]) -> list[StoreView]:
    """One for each store among these processes."""
    return [_store(str(one.process), one.counts) for one in counts if one.process.role is Role.STORE]


def _store(process: str, told: ProcessCounts) -> StoreView:
    hits = told.counters.get("kv_store_hits", {})
    queries = sum(told.counters.get("kv_store_queries", {}).values())
    ceiling = told.gauges.get("kv_store_hit_rate_ceiling", {}).get("", 0.0)
    tiers = tuple(_tier(name, told) for name in told.gauges.get("kv_store_bytes", {}))
    return StoreView(process, round(sum(hits.values()) / max(1, queries), 4), round(ceiling, 4), tiers)


def _tier(name: str, told: ProcessCounts) -> TierView:
    def number(what: str) -> int:
        return int((told.counters.get(f"kv_store_{what}") or told.gauges.get(f"kv_store_{what}", {})).get(name, 0))

    return TierView(
        name=name,
        used_bytes=number("bytes"),
        capacity_bytes=number("capacity_bytes"),
        hits=number("hits"),
        stored=number("stored"),
        evicted=number("evicted"),
        paused=bool(number("paused")),
    )
