"""Adapters that peft made, behind a scheduler: each request's tokens are those of peft's own modules, whatever runs beside it."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from adapters import AdapterBench, adapter_in, greedy, save_adapters, served_with
from served_engines import AGAIN, OUTPUT, PROMPTS, Engines
from small_models import GEMMA, SMALL

from meshlm.protocol.config import SpeculativeConfig

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PACKED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}, ALL),
    "mistral": ("MistralConfig", {"sliding_window": 11}, ALL),
    "qwen2": ("Qwen2Config", {}, ALL),
    "qwen3": ("Qwen3Config", {"head_dim": 16}, ALL),
    "gemma2": ("Gemma2Config", GEMMA, ALL),
    "phi3": ("Phi3Config", {}, PACKED),
}

PAGES = {"gemma2": 40, "mistral": 40}  # of those with windows: enough for all


def configs(modules: list[str]) -> dict[str, dict[str, Any]]:
    return {
        "plain": {"r": 8, "lora_alpha": 16, "target_modules": modules},
        "root": {"r": 4, "lora_alpha": 4, "use_rslora": True, "target_modules": modules[:1] + modules[-1:]},
        "mixed": {
            "r": 2, "lora_alpha": 4, "target_modules": modules[:3],
            "rank_pattern": {modules[0]: 5}, "alpha_pattern": {modules[0]: 9}, "use_dora": True,
        },
    }  # fmt: skip


NAMES = {0: "plain", 1: None, 2: "root", 3: "mixed", 4: "plain", 5: "root", AGAIN[0]: "root", AGAIN[1]: "plain"}


class Case:
    def __init__(self, name: str, folder: Path) -> None:
        import transformers

        self.name = name
        torch.manual_seed(0)
        kind, extra, modules = CASES[name]
        config = getattr(transformers, kind)(**{**SMALL, "initializer_range": 0.2, **extra})
        theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
        theirs.get_input_embeddings().weight.data *= 0.1
        theirs.save_pretrained(folder)
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
        self.folder, self.adapters = folder, folder / "adapters"
        self.theirs = save_adapters(theirs, self.adapters, configs(modules))

    def serve(
        self, pages: int, backend: str = "cpu", tp: int = 1, pp: int = 1, speculative: SpeculativeConfig | None = None
    ) -> AdapterBench:
        slots = 2
        engines = Engines(self.folder, pages, backend, tp, pp, speculative, enable_lora=True, max_loras=slots)
        spec = engines.engines[0].resolved.spec
        known = {
            handle: None if name is None else adapter_in(self.adapters, name, spec) for handle, name in NAMES.items()
        }
        try:
            return served_with(engines, known, slots, pp)
        finally:
            engines.close()

    def expected(self, bench: AdapterBench) -> dict[int, list[int]]:
        assert all(len(tokens) == OUTPUT for tokens in bench.tokens.values())
        return {
            handle: greedy(self.theirs, PROMPTS[min(handle, len(PROMPTS) - 1)], tokens, NAMES[handle])
            for handle, tokens in bench.tokens.items()
        }


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(("backend", "tp", "pp"), [("cpu", 1, 1), ("torch", 2, 1), ("cpu", 1, 3)])
def test_tokens_are_pefts(case: Case, backend: str, tp: int, pp: int) -> None:
    """Three adapters in two slots and rows of the base, in chunks, with preemption and the prefix cache."""
    bench = case.serve(PAGES.get(case.name, 20), backend, tp, pp)
    assert bench.tokens == case.expected(bench)
    has_to_preempt = case.name not in PAGES
    assert bench.core.batching.num_preemptions > 0 or not has_to_preempt, "memory was to be too little"
    assert bench.tokens[AGAIN[0]] == bench.tokens[5], "the same adapter, now behind its cached prefix"
    assert bench.tokens[AGAIN[0]] != bench.tokens[AGAIN[1]], "the adapters are to be no trifle"
    assert bench.cached[AGAIN[0]] > 0
    assert bench.cached[AGAIN[1]] == 0, "another adapter's KV is not this one's"


def test_drafts_change_nothing(tmp_path: Path) -> None:
    case = Case("llama", tmp_path)
    bench = case.serve(40, speculative=SpeculativeConfig(method="suffix", num_speculative_tokens=3))
    assert bench.tokens == case.expected(bench)
