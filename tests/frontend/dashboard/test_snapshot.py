"""What the dashboard's events say, made of what a frontend was told."""

import sys
from typing import Any

import msgspec
import pytest

from meshlm.frontend.dashboard import snapshot as module
from meshlm.frontend.dashboard.requests import SILENT_S, OtherFrontends
from meshlm.frontend.dashboard.snapshot import Facts, Known, Snapshots, Times
from meshlm.protocol.counts import HistogramCounts, ProcessCounts
from meshlm.protocol.dashboard import Snapshot
from meshlm.protocol.edges.control import (
    FrontendRequests,
    GraphCounts,
    MeshProcesses,
    MeshStats,
    News,
    ProcessReport,
    RankStats,
    StandbyReport,
)
from meshlm.protocol.wire.ids import Identity, Incarnation, Role

WORKER = Identity(Role.WORKER, 1)


DRAFTED = {"num_drafts": 40.0, "num_draft_tokens": 100.0, "num_accepted_tokens": 50.0}


def known(second: float, **stats: Any) -> Known:
    rank = RankStats(
        dp_rank=3, num_running=4, num_waiting=2, kv_cache_usage=0.25, prefix_cache_queries=100, prefix_cache_hits=40,
        num_preemptions=1, prompt_tokens=int(1000 * second), generation_tokens=int(200 * second), role="decode", num_hand_offs=7,
        busy_ns=int(9e8 * second), idle_ns=int(1e8 * second), incarnation=8,
    )  # fmt: skip
    device = HistogramCounts(2.0 * second, (int(50 * second), int(50 * second)))
    told = ProcessCounts(
        {f"spec_decode_{name}": {"": count * second} for name, count in DRAFTED.items()},
        {
            "kv_cache_blocks": {"used": 3.0, "empty": 5.0},
            "kv_cache_group_blocks": {"full": 2.0, "sliding": 1.0},
            "num_requests_waiting_by_reason": {"capacity": 2.0},
        },
        {"step_device_time_seconds": device, "step_send_time_seconds": HistogramCounts(1.0, (7, 0))},
    )
    graphs = GraphCounts(expert_loads=(30, 10))
    rank = msgspec.structs.replace(rank, counts=told, graphs=graphs)
    sent = {"scheduler/1": int(50 * second), "supervisor/0": int(2 * second)}
    process = ProcessReport(WORKER, Incarnation(5), 77, "ready", 1000.0, 2, "stepping", 1 << 20, "gpu-7", sent)
    mesh = MeshProcesses((process,), (StandbyReport(Role.WORKER, 78, "standby", 1000.0),), (News(999.5, "error", "x"),))
    news = (News(900.0, "info", "old"), *mesh.news)
    return Known(
        msgspec.structs.replace(MeshStats(True, ranks=(rank,)), **stats), mesh, news, (), OtherFrontends(), 6, 1, 0, ()
    )


def last_of(snapshots: Snapshots, seconds: int = 4) -> Snapshot:
    found = [snapshots.make(known(tick / 10), tick / 10, 1000.0 + tick / 10) for tick in range(10 * seconds)]
    return decoded(found[-1])


def decoded(event: bytes) -> Snapshot:
    """All its fields and no others: it is joined from parts."""
    found = msgspec.json.decode(event, type=Snapshot)
    assert msgspec.to_builtins(found).keys() == msgspec.json.decode(event).keys()
    return found


def test_a_snapshot_of_a_busy_mesh() -> None:
    snapshots = Snapshots(Facts("frontend/0", "1.2", "tiny"))
    snapshots.ttft.observe(0.5, 3.0)
    found = last_of(snapshots)
    assert (found.number, found.frontend, found.model, found.serving, found.num_open) == (
        40,
        "frontend/0",
        "tiny",
        True,
        6,
    )
    (rank,) = found.ranks
    assert (rank.rank, rank.running, rank.waiting, rank.kv_usage, rank.hit_rate) == (3, 4, 2, 0.25, 0.4)
    assert [rank.prompt_per_s, rank.generated_per_s] == pytest.approx([1000, 200], rel=0.02)
    assert [found.prompt_per_s, found.generated_per_s] == [rank.prompt_per_s, rank.generated_per_s]
    assert rank.busy == pytest.approx(0.9, abs=0.01)
    assert (rank.role, rank.hand_offs) == ("decode", 7)
    assert (found.ttft.count, found.itl.count) == (1, 0)
    assert (rank.kv_pages, rank.kv_groups) == ({"used": 3, "empty": 5}, {"full": 2, "sliding": 1})
    assert (rank.waiting_for, rank.expert_loads) == ({"capacity": 2}, (30, 10))
    assert (rank.accepted, rank.accepted_len) == (0.5, 2.25)
    assert rank.step == {"device": pytest.approx(0.02, rel=0.05)}, "hops that no step passed of late are absent"
    (process,) = found.processes
    assert (process.name, process.node, process.state, process.restarts) == ("worker/1", "gpu-7", "ready", 2)
    assert process.uptime_s == pytest.approx(3.9)
    assert [one.name for one in found.standbys] == ["worker"]
    assert {(edge.source, edge.target): edge.per_s for edge in found.edges} == {
        ("worker/1", "scheduler/1"): pytest.approx(50, rel=0.05)
    }
    assert [(one.level, one.text) for one in found.news] == [("error", "x")]


def test_a_rank_that_drafts_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DRAFTED", {})
    (rank,) = last_of(Snapshots(Facts("f", "1", "m"))).ranks
    assert (rank.accepted, rank.accepted_len) == (None, None)


def test_a_mesh_that_does_not_serve_says_why() -> None:
    told = known(0, serving=False, reason="no detokenizer", ranks=())
    found = decoded(Snapshots(Facts("f", "1", "m")).make(told, 0.0, 0.0))
    assert (found.serving, found.reason, found.ranks, found.generated_per_s) == (False, "no detokenizer", (), 0)


def test_what_has_not_changed_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []

    def encode(fields: dict[str, object]) -> bytes:
        encoded.append(next(iter(fields)))
        return msgspec.json.encode(fields)

    monkeypatch.setattr(module, "_encode", encode)
    snapshots, told = Snapshots(Facts("f", "1", "m")), known(0)
    for tick in range(20):
        snapshots.make(told, tick / 10, 1000.0 + tick / 10)
    assert {name: encoded.count(name) for name in encoded} == {
        "number": 20,
        "missing": 1,
        "prompt_per_s": 4,
        "running": 2,
    }


def test_times_and_open_requests_are_those_of_all_frontends_that_are_heard() -> None:
    others, snapshots = OtherFrontends(), Snapshots(Facts("frontend/0", "1", "m"))
    elsewhere = Times()
    for number in range(100):
        snapshots.ttft.observe(0.1, 5.0)
        elsewhere.observe(0.4 if number < 95 else 2.0, 5.0)
    buckets = elsewhere.buckets(5.0)
    answer = FrontendRequests("frontend/1", Identity(Role.FRONTEND, 0), 0.0, 0.0, 0, (), (), 7, buckets, {0: 3})
    others.take(answer, 5.0)
    told = msgspec.structs.replace(known(0), others=others)
    found = decoded(snapshots.make(told, 5.5, 1000.0))
    assert (found.ttft.count, found.itl.count, found.num_open) == (200, 3, 13)
    assert [found.ttft.p50, found.ttft.p90, found.ttft.p99] == pytest.approx([0.1, 0.4, 2.0], rel=0.021)
    later = decoded(snapshots.make(told, 5.5 + SILENT_S, 1002.0))
    assert (later.ttft.count, later.num_open) == (100, 6), "a frontend that is silent has none"
