"""benchmarks/kv_groups.py: what windows save, by the worker's planning of memory and the scheduler's KVCache."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from meshlm.architectures.layers import with_attention

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_gemma_3_4b_holds_more_than_two_and_a_half_times_the_tokens(
    benchmark_module: Callable[[str], ModuleType],
) -> None:
    """In a fifth of the memory of the committed figure, to whole requests of 32,768 tokens."""
    groups = benchmark_module("kv_groups")
    config = groups.configured("gemma3-4b", 32768)
    model = config.resolved.spec
    grouped = groups.held(config, model, 8 << 30, 32768)
    every = groups.held(config, with_attention(model, sliding_window=0), 8 << 30, 32768)
    assert (grouped["groups"], every["groups"]) == (7, 1)
    assert grouped["tokens"] >= 2.5 * every["tokens"] > 0
    (committed,) = json.loads((RESULTS / "kv_groups_gemma-3-4b.json").read_text())["results"]
    assert committed["grouped"]["tokens"] >= 2.5 * committed["every"]["tokens"]
    assert committed["grouped"]["page_bytes"] == grouped["page_bytes"], "measured with other pages"


def test_gemma_3_27b_holds_what_vllm_holds_in_the_same_bytes(benchmark_module: Callable[[str], ModuleType]) -> None:
    """The committed figures of vLLM's own KVCacheManager; what MeshLM holds is counted again, but for the longest requests."""
    groups = benchmark_module("kv_groups")
    committed = json.loads((RESULTS / "kv_groups_gemma-3-27b.json").read_text())
    config = groups.configured("gemma3-27b", committed["max_model_len"])
    budget = int(committed["memory_gib"] * 2**30)
    assert all(one["grouped"]["tokens"] >= one["vllm"]["tokens"] > 0 for one in committed["results"])
    short = committed["results"][-1]
    held = groups.held(config, config.resolved.spec, budget, short["request_tokens"])
    assert held["tokens"] >= short["vllm"]["tokens"]
    hits = groups.found(config, config.resolved.spec, budget)
    assert hits == committed["found"]["grouped"] == committed["found"]["every"] == [groups.PREFIX] * 2
