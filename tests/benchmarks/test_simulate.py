"""benchmarks/simulate.py runs to its end with the cores as they are, and its figures are of what it sent."""

import argparse
import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = BENCHMARKS / "results" / "engine_step_llama3-8b_h200.json"


@pytest.mark.parametrize("kind", ["shared-prefix", "multi-turn"])
@pytest.mark.parametrize("routing", ["cache-aware", "round-robin"])
def test_a_small_world(monkeypatch: pytest.MonkeyPatch, kind: str, routing: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    mesh, traffic = importlib.import_module("simulated_mesh"), importlib.import_module("simulated_traffic")
    options = argparse.Namespace(
        timing=traffic.fitted(STEPS), ranks_per_detokenizer=2, rate=12.0, output_tokens=20.0, seed=0, kv_tokens=65536
    )
    world = mesh.World(options, 3, routing, kind, 60)
    world.run()
    found = world.result()
    assert found["requests"] == world.traffic.count == 60
    assert 0 < found["hit_rate"] < 1
    assert found["ttft_ms"]["p50"] > 0
    assert not world.jobs
    json.dumps(found)
