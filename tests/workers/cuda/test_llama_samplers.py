"""llama.cpp's samplers on a GPU: rows that have them stay in their CUDA graphs and say what they say launched kernel by kernel."""

from itertools import pairwise
from pathlib import Path

import pytest
from engine_driver import Driver, engine, prompts_of

from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.engine.engine import ModelEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
KINDS = {
    "typical": SamplingParams(max_tokens=30, seed=1, typical_p=0.6),
    "sigma": SamplingParams(max_tokens=30, seed=2, top_n_sigma=1.0, top_k=50, top_p=0.9),
    "xtc": SamplingParams(max_tokens=30, seed=3, xtc_probability=0.5, xtc_threshold=0.01, min_p=0.01),
    "dry": SamplingParams(max_tokens=30, temperature=0.0, dry_multiplier=5.0, dry_allowed_length=1),
}


def tokens_of(made: ModelEngine, params: SamplingParams) -> list[list[int]]:
    made.reset()
    driver = Driver(made, prompts_of([40, 77]), params)
    driver.step({0: 40, 1: 77})
    driver.strict = True
    for _ in range(20):
        driver.step({0: 1, 1: 1})
    return driver.tokens


def test_in_graphs_and_launched_one_by_one(tmp_path: Path) -> None:
    found = []
    for mode in ("FULL", "NONE"):
        made = engine(tmp_path, cudagraph_mode=mode)
        while made.idle():
            pass
        before = made.graphs.replays["decode"]
        found.append({kind: tokens_of(made, params) for kind, params in KINDS.items()})
        assert made.graphs.replays["decode"] - before == (80 if mode == "FULL" else 0)
        del made
    assert found[0] == found[1]
    for tokens in found[0]["dry"]:
        pairs = list(pairwise(tokens))
        assert len(set(pairs)) == len(pairs), "no pair is said twice"
