"""benchmarks/kv_groups.py: what windows save, by the worker's planning of memory and the scheduler's KVCache."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from msgspec.structs import replace

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results" / "kv_groups_gemma-3-4b.json"


def test_gemma_3_4b_holds_more_than_two_and_a_half_times_the_tokens(
    benchmark_module: Callable[[str], ModuleType],
) -> None:
    """In a fifth of the memory of the committed figure, to whole requests of 32,768 tokens."""
    groups = benchmark_module("kv_groups")
    config = groups.configured(32768)
    model = config.resolved.spec
    grouped = groups.held(config, model, 8 << 30)
    every = groups.held(config, replace(model, sliding_window=0, sliding_layers=()), 8 << 30)
    assert (grouped["groups"], every["groups"]) == (7, 1)
    assert grouped["tokens"] >= 2.5 * every["tokens"] > 0
    committed = json.loads(COMMITTED.read_text())
    assert committed["grouped"]["tokens"] >= 2.5 * committed["every"]["tokens"]
    assert committed["grouped"]["page_bytes"] == grouped["page_bytes"], "measured with other pages"
