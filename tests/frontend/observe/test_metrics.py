"""What /metrics says of the mesh; in a process of its own, as the library's registry is one for all."""

import subprocess
import sys
from pathlib import Path

import vllm_metrics
from prometheus_client.parser import text_string_to_metric_families

SAID = """
import sys
from meshlm.runtime.process.metrics import prepare
if sys.argv[1:]:
    assert prepare(sys.argv[1], 1) == ""
from meshlm.frontend.observe.metrics import Metrics, exposition
from meshlm.protocol.edges.control import GraphCounts, MeshStats, RankStats
from meshlm.protocol.wire.ids import FinishReason
from meshlm.protocol.edges.token import First

metrics = Metrics("m", 4096)

def said(queries, incarnation, replays=0, worker=0):
    graphs = GraphCounts({"decode": replays}, {"off": 1}, worker) if replays else GraphCounts()
    busy = RankStats(3, 1, 0, 0.5, queries, 0, 4, 0, 0, graphs, 2_500_000_000, 10_000_000, incarnation)
    metrics.mesh(MeshStats(True, ranks=(busy, RankStats(4, 0, 0, 0.0, 0, 0, 0, 0, 0, incarnation=1))))
"""


def told(script: str, *arguments: str, said: str = SAID) -> str:
    command = [sys.executable, "-P", "-c", said + script + "print(exposition().decode())", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_sizes_of_a_kv_cache_are_those_of_its_workers_now() -> None:
    """As vLLM names them; not before they are known, and 0 for what they were before the workers were started anew."""
    script = """
for sizes in ((0, 0.0), (8192, 2.0), (8192, 2.0), (6144, 1.5)):
    rank = RankStats(3, 0, 0, 0.0, 0, 0, 0, 0, 0, kv_cache_tokens=sizes[0], kv_cache_requests=sizes[1])
    metrics.mesh(MeshStats(True, ranks=(rank, RankStats(4, 0, 0, 0.0, 0, 0, 0, 0, 0, kv_cache_requests=float("inf")))))
"""
    said = SAID.replace('Metrics("m", 4096)', 'Metrics("n", 4096, cache={"block_size": "16"})')
    lines = {line for line in told(script, said=said).splitlines() if "cache_config_info{" in line}
    of = 'meshlm:cache_config_info{block_size="16",engine="%s",kv_cache_max_concurrency="%s",'
    of += 'kv_cache_size_tokens="%s",model_name="n"} %s'
    assert lines == {
        of % each for each in (("3", "2.00", "8192", "0.0"), ("3", "1.50", "6144", "1.0"), ("4", "inf", "0", "1.0"))
    }


def test_roles_of_ranks_and_what_they_hand_off() -> None:
    script = """
for role, gone in (("decode", False), ("prefill", False), ("prefill", True)):
    ranks = (RankStats(3, 0, 0, 0.0, 0, 0, 0, 0, 0, role=role, num_hand_offs=5, incarnation=1),)
    ranks += () if gone else (RankStats(4, 0, 0, 0.0, 0, 0, 0, 0, 0, role="decode", incarnation=1),)
    metrics.mesh(MeshStats(True, ranks=ranks))
metrics.mesh(MeshStats(True, ranks=(*ranks, RankStats(5, 0, 0, 0.0, 0, 0, 0, 0, 0))))
"""
    lines = told(script).splitlines()
    assert {line for line in lines if line.startswith("meshlm:rank_role{")} == {
        f'meshlm:rank_role{{engine="{engine}",model_name="m",role="{role}"}} {value}'
        for engine, role, value in (
            ("3", "prefill", 1.0),
            ("3", "decode", 0.0),
            ("4", "prefill", 0.0),
            ("4", "decode", 0.0),
        )
    }
    assert 'meshlm:request_hand_offs_total{engine="3",model_name="m"} 5.0' in lines


def test_graph_counts_by_engine_and_reason() -> None:
    lines = told("said(0, 1, 7, 1); said(0, 1, 9, 1)\n").splitlines()
    assert 'meshlm:cudagraph_replays_total{engine="3",kind="decode",model_name="m"} 9.0' in lines
    assert 'meshlm:cudagraph_misses_total{engine="3",model_name="m",reason="off"} 1.0' in lines
    assert 'meshlm:num_preemptions_total{engine="3",model_name="m"} 4.0' in lines
    assert 'meshlm:device_busy_seconds_total{engine="3",model_name="m"} 2.5' in lines
    assert 'meshlm:device_idle_seconds_total{engine="3",model_name="m"} 0.01' in lines
    assert not [line for line in lines if "cudagraph" in line and 'engine="4"' in line]


def test_counts_of_other_processes_never_fall(tmp_path: Path) -> None:
    """A scheduler, its worker and a frontend die, each apart: the counters go on from what they were."""

    def counted(script: str) -> tuple[float, float]:
        for family in text_string_to_metric_families(told(script, str(tmp_path))):
            for sample in family.samples:
                if sample.labels.get("engine") == "3":
                    found[sample.name] = sample.value
                    kinds[sample.name] = family.type
        return found["meshlm:prefix_cache_queries_total"], found["meshlm:cudagraph_replays_total"]

    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    assert counted("said(100, incarnation=1, replays=50, worker=1)\n") == (100, 50)
    assert counted("said(7, incarnation=2, replays=60, worker=1)\n") == (
        107,
        60,
    )  # another frontend, and another scheduler
    assert counted("said(9, incarnation=2, replays=3, worker=2)\n") == (109, 63)  # another worker
    assert kinds["meshlm:prefix_cache_queries_total"] == kinds["meshlm:num_preemptions_total"] == "counter"
    assert found["meshlm:num_requests_running"] == 1


def test_metrics_are_what_vllm_s_are() -> None:
    """By name, type, labels and buckets; docs/from-vllm.md names those that are not there."""
    seen = "e = metrics.engine('3'); said(1, 1)\n"
    families = {
        family.name.removeprefix("meshlm:"): family
        for family in text_string_to_metric_families(told(seen))
        if family.name.startswith("meshlm:")
    }
    labels: tuple[str, ...]
    for name, labels in vllm_metrics.GAUGES.items():
        assert families[name].type == "gauge"
        assert set(families[name].samples[0].labels) == set(labels), name
    for name, labels in vllm_metrics.COUNTERS.items():
        assert families[name].type == "counter", name
        assert {sample.name for sample in families[name].samples} >= {f"meshlm:{name}_total"}
        assert all(set(sample.labels) == set(labels) for sample in families[name].samples), name
    reasons = {sample.labels["finished_reason"] for sample in families["request_success"].samples}
    assert reasons == set(vllm_metrics.FINISHED_REASONS)
    for name, ends in vllm_metrics.HISTOGRAMS.items():
        assert families[name].type == "histogram"
        samples = [sample for sample in families[name].samples if sample.labels["engine"] == "3"]
        assert all(set(sample.labels) - {"le"} == set(vllm_metrics.ENGINE) for sample in samples), name
        ours = [float(sample.labels["le"]) for sample in samples if sample.name.endswith("_bucket")]
        assert ours[vllm_metrics.FINER.get(name, 0) :] == [*ends, float("inf")], name


BULK = """
from meshlm.protocol.edges.token import First
engine = metrics.engine("3")
value, writes = type(engine.generation_tokens._value), 0
inc = value.inc

def counted(self, *amount):
    global writes
    writes += 1
    return inc(self, *amount)

value.inc = counted
for number in range(4000):
    engine.e2e.observe(2.0)
    engine.ttft.observe(0.0)
    engine.phases(First(0, 0, 3_000_000, 0), 0.5)
    engine.finished(FinishReason.LENGTH)
metrics.flush()
metrics.flush()
assert writes < 20, writes
"""


def test_many_sequences_are_observed_at_once() -> None:
    """The end of an answer with 4,000 sequences held its frontend up for 0.3 s: 40,000 writes to the shared files."""
    lines = told(BULK).splitlines()
    name = "meshlm:request_{}_time_seconds_{}"
    labels = 'engine="3",model_name="m"'
    assert f"meshlm:e2e_request_latency_seconds_sum{{{labels}}} 8000.0" in lines
    assert f"meshlm:e2e_request_latency_seconds_count{{{labels}}} 4000.0" in lines
    assert f"meshlm:time_to_first_token_seconds_count{{{labels}}} 4000.0" in lines, "zeros are observations"
    assert f"{name.format('queue', 'count')}{{{labels}}} 4000.0" in lines
    assert f"{name.format('inference', 'sum')}{{{labels}}} 14000.0" in lines
    success = 'meshlm:request_success_total{engine="3",finished_reason="length",model_name="m"} 4000.0'
    assert success in lines
