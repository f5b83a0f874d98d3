"""Adapters of embeddings and heads, modules and tokens that were trained whole: tokens and logits are those of peft's modules."""

import copy
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from adapters import AdapterBench, adapter_in, greedy, save_adapters, served_with
from served_engines import AGAIN, OUTPUT, PROMPTS, Engines
from small_models import CLASSIC, GEMMA, SMALL

from meshlm.protocol.config import SpeculativeConfig

CONFIGS: dict[str, dict[str, Any]] = {
    "pairs": {"r": 4, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    "whole": {
        "r": 4,
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens", "lm_head", "o_proj", "down_proj"],
    },
    "tokens": {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [9, 3, 150, 60, 31, 7]},
}
TIED: dict[str, dict[str, Any]] = {
    "pairs": {"r": 4, "target_modules": ["embed_tokens", "v_proj"]},
    "whole": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "up_proj"]},
    "tokens": CONFIGS["tokens"],
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}, CONFIGS),
    "tied": ("Qwen2Config", {"tie_word_embeddings": True}, TIED),
    "gemma2": ("Gemma2Config", GEMMA, TIED),
    "cohere": ("CohereConfig", {"logit_scale": 0.5, "tie_word_embeddings": True}, TIED),
    "opt": (*CLASSIC["opt"], {"tokens": CONFIGS["tokens"], "pairs": TIED["pairs"], "whole": {
        "r": 4, "target_modules": ["q_proj"], "modules_to_save": ["fc1", "k_proj"]}}),
}  # fmt: skip
NAMES = {0: "pairs", 1: None, 2: "whole", 3: "tokens", 4: "pairs", 5: "whole", AGAIN[0]: "whole", AGAIN[1]: "tokens"}


class Case:
    def __init__(self, name: str, folder: Path, *, with_base: bool = False) -> None:
        import transformers

        torch.manual_seed(0)
        kind, extra, configs = CASES[name]
        config = getattr(transformers, kind)(**{**SMALL, "initializer_range": 0.2, **extra})
        theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
        theirs.save_pretrained(folder)
        tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
        self.folder, self.adapters = folder, folder / "adapters"
        self.theirs = {  # a model each: peft has one of these kinds in a module
            name: save_adapters(copy.deepcopy(theirs), self.adapters, {name: config}, with_base=with_base)
            for name, config in configs.items()
        }

    def serve(self, tp: int = 1, pp: int = 1, speculative: SpeculativeConfig | None = None) -> AdapterBench:
        backend = "cpu" if tp == 1 else "torch"
        engines = Engines(self.folder, 40, backend, tp, pp, speculative, enable_lora=True, max_loras=3)
        spec = engines.engines[0].resolved.spec
        known = {at: None if name is None else adapter_in(self.adapters, name, spec) for at, name in NAMES.items()}
        try:
            return served_with(engines, known, 3, pp)
        finally:
            engines.close()

    def check(self, bench: AdapterBench) -> None:
        assert all(len(tokens) == OUTPUT for tokens in bench.tokens.values())
        expected = {
            at: greedy(self.theirs[NAMES[at] or "pairs"], PROMPTS[min(at, len(PROMPTS) - 1)], tokens, NAMES[at])
            for at, tokens in bench.tokens.items()
        }
        assert bench.tokens == expected
        assert bench.tokens[AGAIN[0]] != bench.tokens[AGAIN[1]], "the adapters are to be no trifle"


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_pefts(name: str, tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    case.check(case.serve())


@pytest.mark.parametrize("name", ["llama", "tied"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 3)])
def test_over_ranks(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    case = Case(name, tmp_path)
    case.check(case.serve(tp, pp))


def test_the_bases_table_beside_an_adapter_of_it(tmp_path: Path) -> None:
    case = Case("llama", tmp_path, with_base=True)
    case.check(case.serve())


def test_with_drafts(tmp_path: Path) -> None:
    case = Case("llama", tmp_path)
    case.check(case.serve(speculative=SpeculativeConfig(method="suffix", num_speculative_tokens=3)))
