"""What /metrics says of the mesh; in a process of its own, as the library's registry is one for all."""

import subprocess
import sys

SAID = """
from prometheus_client import REGISTRY, generate_latest
from meshlm.frontend.metrics import Metrics
from meshlm.protocol.control_edge import GraphCounts, MeshStats, RankStats

metrics = Metrics("m")
for replays in (7, 9):
    graphs = GraphCounts({"decode": replays}, {"too_many_tokens": 2, "prompt_logprobs": 1})
    busy = RankStats(3, 1, 0, 0.5, 0, 0, 4, 0, 0, graphs, 2_500_000_000, 10_000_000)
    metrics.mesh(MeshStats(True, ranks=(busy, RankStats(4, 0, 0, 0.0, 0, 0, 0, 0, 0))))
print(generate_latest(REGISTRY).decode())
"""


def test_graph_counts_by_engine_and_reason() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", SAID], capture_output=True, text=True, check=True, timeout=60)
    lines = done.stdout.splitlines()
    assert 'meshlm:cudagraph_replays_total{engine="3",kind="decode",model_name="m"} 9.0' in lines
    assert 'meshlm:cudagraph_misses_total{engine="3",model_name="m",reason="too_many_tokens"} 2.0' in lines
    assert 'meshlm:cudagraph_misses_total{engine="3",model_name="m",reason="prompt_logprobs"} 1.0' in lines
    assert 'meshlm:num_preemptions_total{engine="3",model_name="m"} 4.0' in lines
    assert 'meshlm:device_busy_seconds_total{engine="3",model_name="m"} 2.5' in lines
    assert 'meshlm:device_idle_seconds_total{engine="3",model_name="m"} 0.01' in lines
    assert not [line for line in lines if "cudagraph" in line and 'engine="4"' in line]
