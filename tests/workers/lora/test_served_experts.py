"""Adapters of experts behind a scheduler: each request's tokens are those of peft's own modules, whatever runs beside it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from adapters import AdapterBench, adapter_in, greedy, save_adapters, served_with
from served_engines import AGAIN, OUTPUT, PROMPTS, Engines
from small_models import MOE, SMALL

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "both": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "target_parameters": BOTH},
    "down": {"r": 8, "use_rslora": True, "target_modules": [], "target_parameters": BOTH[1:]},
    "plain": {"r": 4, "target_modules": ["q_proj", "o_proj"]},
}
NAMES = {0: "both", 1: None, 2: "down", 3: "plain", 4: "both", 5: "down", AGAIN[0]: "down", AGAIN[1]: "both"}
SLOTS = 2


class Case:
    def __init__(self, name: str, folder: Path) -> None:
        import transformers

        torch.manual_seed(0)
        kind, extra = MOE[name]
        config = getattr(transformers, kind)(**{**SMALL, "initializer_range": 0.2, **extra})
        theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
        theirs.get_input_embeddings().weight.data *= 0.1
        theirs.save_pretrained(folder)
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
        self.folder, self.adapters = folder, folder / "adapters"
        self.theirs = {  # a model each: all adapters of one must target the same parameters
            name: save_adapters(copy.deepcopy(theirs), self.adapters, {name: config})
            for name, config in CONFIGS.items()
        }

    def serve(self, pages: int, backend: str, tp: int, pp: int, *, expert_parallel: bool) -> AdapterBench:
        engines = Engines(
            self.folder, pages, backend, tp, pp, expert_parallel=expert_parallel, enable_lora=True, max_loras=SLOTS
        )  # fmt: skip
        spec = engines.engines[0].resolved.spec
        known = {at: None if name is None else adapter_in(self.adapters, name, spec) for at, name in NAMES.items()}
        try:
            return served_with(engines, known, SLOTS, pp)
        finally:
            engines.close()


@pytest.fixture(params=["qwen3-moe", "gpt-oss"], scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(("tp", "pp", "expert_parallel"), [(1, 1, False), (2, 1, False), (2, 1, True), (1, 3, False)])
def test_tokens_are_pefts(case: Case, tp: int, pp: int, expert_parallel: bool) -> None:
    """Three adapters in two slots and rows of the base, in chunks, behind cached prefixes; with tensor ranks that have a part of each
    expert, or some of the experts."""
    bench = case.serve(40, "cpu" if tp == 1 else "torch", tp, pp, expert_parallel=expert_parallel)
    assert all(len(tokens) == OUTPUT for tokens in bench.tokens.values())
    expected = {
        at: greedy(case.theirs[NAMES[at] or "plain"], PROMPTS[min(at, len(PROMPTS) - 1)], tokens, NAMES[at])
        for at, tokens in bench.tokens.items()
    }
    assert bench.tokens == expected
    assert bench.tokens[AGAIN[0]] == bench.tokens[5], "the same adapter, now behind its cached prefix"
    assert bench.tokens[AGAIN[0]] != bench.tokens[AGAIN[1]], "the adapters are to be no trifle"
    assert bench.cached[AGAIN[0]] > 0
    assert bench.cached[AGAIN[1]] == 0, "another adapter's KV is not this one's"
