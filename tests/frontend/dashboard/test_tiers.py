"""The store's tiers in a snapshot are what it counts."""

from meshlm.frontend.dashboard import tiers
from meshlm.protocol.counts import CountsOf, ProcessCounts
from meshlm.protocol.dashboard import StoreView, TierView
from meshlm.protocol.wire.ids import Identity, Role

COUNTERS = {
    "kv_store_queries": {"": 40.0},
    "kv_store_hits": {"memory": 20.0, "disk": 5.0},
    "kv_store_stored": {"memory": 90.0, "disk": 80.0},
    "kv_store_evicted": {"memory": 30.0},
}
GAUGES = {
    "kv_store_bytes": {"memory": 600.0, "disk": 800.0},
    "kv_store_capacity_bytes": {"memory": 1000.0},
    "kv_store_hit_rate_ceiling": {"": 0.75},
    "kv_store_paused": {"disk": 1.0},
}
STORE, OTHER = Identity(Role.STORE), Identity(Role.DETOKENIZER)


def test_tiers_are_told_by_name() -> None:
    told = (CountsOf(OTHER, ProcessCounts()), CountsOf(STORE, ProcessCounts(COUNTERS, GAUGES)))
    assert tiers.stores(told) == [
        StoreView(
            "store/0",
            0.625,
            0.75,
            (TierView("memory", 600, 1000, 20, 90, 30, False), TierView("disk", 800, 0, 5, 80, 0, True)),
        )
    ]


def test_a_store_that_was_asked_for_nothing_had_nothing() -> None:
    (found,) = tiers.stores([CountsOf(STORE, ProcessCounts({}, {"kv_store_bytes": {"memory": 0.0}}))])
    assert found == StoreView("store/0", 0.0, 0.0, (TierView("memory", 0, 0, 0, 0, 0, False),))
