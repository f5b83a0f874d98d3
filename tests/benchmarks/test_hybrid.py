"""benchmarks/hybrid.py: what pages of states and of keys and values leave unused together, and what of a prefix is found."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from meshlm.runtime.model_files.model_config import parse_config

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results" / "hybrid_pages.json"


def test_at_most_a_twentieth_is_unused(benchmark_module: Callable[[str], ModuleType]) -> None:
    """As committed; the cache has room for two prompts."""
    hybrid = benchmark_module("hybrid")
    committed = [one for one in json.loads(COMMITTED.read_text())["results"] if one["ssm_dtype"] == "auto"]
    assert {one["model"] for one in committed} == set(hybrid.SHAPES)
    for one in committed:
        assert one["waste"] <= 0.05
        if one["mode"] == "align":
            found = hybrid.measure(one["model"], "auto", "align", 16 << 30, 32768)
            for name in ("block_tokens", "groups", "page_mib", "waste", "found", "limited_by"):
                assert found[name] == one[name], name


def test_each_shape_is_a_model_with_states(benchmark_module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    hybrid = benchmark_module("hybrid")
    for config in hybrid.SHAPES.values():
        assert parse_config(config, tmp_path)[0].state is not None
