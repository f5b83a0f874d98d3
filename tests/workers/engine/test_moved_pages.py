"""Pages that one engine computed and another took over, for all kinds of groups: logits are those of the engine that computed them, to
the last bit.

They lie elsewhere in the other engine, and all that its requests do not need is NaN.
"""

from pathlib import Path
from typing import Any

import bench
import pytest
import torch
from hybrid_cases import CASES as HYBRID
from page_copies import copied, copy_of
from served_engines import LENGTH, OUTPUT, PROMPTS, STEP, WINDOW, Engines, ask, made
from small_models import DEEPSEEK, GEMMA

from meshlm.protocol.kv import KVSpec, Latent, RecurrentState, SlidingWindow
from meshlm.protocol.sleeping import KV_CACHE
from meshlm.workers.kv.mirror import PrefixCacheMirror
from meshlm.workers.kv.pages import HostPages
from meshlm.workers.output.sampler import TorchHead

FP8 = {"kv_cache_dtype": "fp8"}
CASES: dict[str, tuple[tuple[str, dict[str, Any]], str, dict[str, Any], type[KVSpec] | None]] = {
    "full": (("LlamaConfig", {}), "cpu", {}, None),
    "full, two ranks": (("LlamaConfig", {}), "cpu", {"tp": 2}, None),
    "full, FP8": (("LlamaConfig", {}), "torch", FP8, None),
    "sliding": (("Gemma3TextConfig", {**GEMMA, "sliding_window": WINDOW, "num_hidden_layers": 8}), "cpu", {}, SlidingWindow),
    "sliding, FP8": (("MistralConfig", {"sliding_window": WINDOW, "num_hidden_layers": 4}), "torch", FP8, SlidingWindow),
    "latent": (DEEPSEEK["deepseek-v2"], "torch", {}, Latent),
    "states": (HYBRID["bamba"], "torch", {"mamba_cache_mode": "align", "mamba_block_size": 48}, RecurrentState),
    "states, two stages": (HYBRID["granite"], "torch", {"mamba_block_size": 48, "pp": 2}, RecurrentState),
    "states of numbers": (HYBRID["qwen3-next"], "cpu", {"mamba_block_size": 48}, RecurrentState),
}  # fmt: skip
PAGES = 96
SHARES: dict[str, Any] = {"dp_roles": "prefill:1,decode:1", "data_parallel_size": 2}


class Listening:
    """The logits that the last stage of some engines makes."""

    def __init__(self, engines: Engines) -> None:
        self.logits: list[torch.Tensor] = []
        engine = engines.engines[-1]
        assert isinstance(engine.head, TorchHead)
        sample = engine.head.sample

        def noted(hidden: torch.Tensor, *others: Any) -> None:
            if engine.shard.tp_size == 1:
                self.logits.append(engine.model.logits(hidden).clone())
            sample(hidden, *others)

        setattr(engine.head, "sample", noted)  # noqa: B010 - mypy lets nobody assign a method


def scheduler(engines: Engines, stages: int, known: PrefixCacheMirror, monkeypatch: pytest.MonkeyPatch) -> bench.Bench:
    """A scheduler whose workers know these pages."""
    monkeypatch.setattr(bench, "PrefixCacheMirror", lambda: known)
    limits = bench.limits(max_model_len=LENGTH, max_num_batched_tokens=STEP, num_stages=stages)
    engines.cached = known._hashes
    return bench.Bench(limits, 0, 0, model=engines)


def move(one: Engines, other: Engines, cached: dict[int, bytes]) -> PrefixCacheMirror:
    """The other engines take these pages over, each to another place; what they know then."""
    known = PrefixCacheMirror()
    known._hashes = {(page * 5 + 3) % PAGES: key for page, key in cached.items()}
    assert len(known._hashes) == len(cached)
    for mine, its in zip(one.engines, other.engines, strict=True):
        assert mine.pages is not None
        assert its.pages is not None
        assert mine.pages.memory is not None
        copy = copy_of(mine.pages.memory, list(known._hashes), list(cached))
        assert copied(its.pages, copy)[::2] == (len(cached), "")
    return known


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_engine_that_computed_them(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend, others, kind = CASES[case]
    made(model, tmp_path)
    stages = others.get("pp", 1)
    one, other = (Engines(tmp_path, PAGES, backend, **others, **SHARES) for _ in range(2))
    try:
        assert kind is None or any(isinstance(spec, kind) for spec in one.kv_specs)
        first = scheduler(one, stages, PrefixCacheMirror(), monkeypatch)
        ask(first, 0, PROMPTS[-1])
        first.finish()
        cached = dict(first.directory._hashes)
        second = scheduler(other, stages, move(one, other, cached), monkeypatch)
        found = []
        for served, engines in ((first, one), (second, other)):
            heard = Listening(engines)
            ask(served, 1, PROMPTS[-1])
            served.finish()
            found.append((served.cached[1], served.tokens[1], heard.logits))
    finally:
        one.close()
        other.close()
    (here, tokens, logits), (there, same_tokens, same_logits) = found
    assert here == there >= 48, "too little was found in the prefix cache"
    assert tokens == same_tokens == first.tokens[0]
    assert len(tokens) == OUTPUT
    assert len(logits) == len(same_logits) == (0 if "tp" in others else OUTPUT)
    assert all(torch.equal(*pair) for pair in zip(logits, same_logits, strict=True))


def test_pages_of_states_of_drafts_stay_here(tmp_path: Path) -> None:
    made(HYBRID["bamba"], tmp_path)
    engines = Engines(tmp_path, 20, "torch", **SHARES)
    engine = engines.engines[0]
    engine._make_draft_states(20, 4)
    groups = len(engine.layout.state_groups)
    assert len(engine.compute.caches[0].tensors()[-1][0]) == 20 + 4 * groups > 20
    whole = engine.pages
    assert isinstance(whole, HostPages)
    assert whole.num_pages == 20
    assert whole.page_bytes == engine.layout.page_bytes
    engines.close()


def test_shared_memory_is_given_back_in_a_sleep(tmp_path: Path) -> None:
    """As private memory is: the file that others may map has no bytes then, and zeros afterwards."""
    made(("LlamaConfig", {}), tmp_path)
    engines = Engines(tmp_path, PAGES, "torch", **SHARES)
    engine = engines.engines[0]
    assert engine.pages is not None
    assert engine.pages.memory is not None
    path = Path(engine.pages.memory.path)
    for cache in engine.compute.caches:
        cache.keys.fill_(1.0)
    before = path.stat().st_blocks
    engine.be_without((KV_CACHE,))
    assert path.stat().st_blocks < before / 4
    engine.be_without(())
    assert sum(int(cache.keys.count_nonzero()) for cache in engine.compute.caches) < PAGES * 4096
    engines.close()
