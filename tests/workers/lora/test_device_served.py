"""Adapters in a GPU's slots, whose kernels the interpreter computes, behind a scheduler: tokens are those of peft's own modules."""

from pathlib import Path

import pytest
import tokenizers
import torch

pytest.importorskip("triton")

from adapters import AdapterBench, adapter_in, greedy, save_adapters, served_with
from interpreted_engine import interpreter, made_alone
from served_engines import AGAIN, OUTPUT, PROMPTS, Engines
from small_models import SMALL

from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.workers.engine.triton_inputs import TritonInputs
from meshlm.workers.lora.device_adapters import DeviceStepAdapters

if torch.cuda.is_available():
    pytest.skip("these tensors are on the CPU, where kernels run in the interpreter", allow_module_level=True)

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ALL},
    "root": {"r": 4, "lora_alpha": 4, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "mixed": {
        "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {"q_proj": 16}, "alpha_pattern": {"q_proj": 9},
    },
}  # fmt: skip
NAMES = {0: "plain", 1: None, 2: "root", 3: "mixed", 4: "plain", 5: "root", AGAIN[0]: "root", AGAIN[1]: "plain"}
MODEL = {"num_hidden_layers": 1, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
SLOTS = 2


def served(folder: Path, pages: int, monkeypatch: pytest.MonkeyPatch, method: str = "") -> tuple[AdapterBench, int]:
    """And the steps that kernels of adapters were launched for."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(**{**SMALL, "initializer_range": 0.2, **MODEL})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    theirs.get_input_embeddings().weight.data *= 0.1
    theirs.save_pretrained(folder)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    peft = save_adapters(theirs, folder / "adapters", CONFIGS)
    made, drafts = DeviceStepAdapters.__init__, SpeculativeConfig(method=method, num_speculative_tokens=2)
    adapted: list[int] = []

    def counted(self: DeviceStepAdapters, *given: object) -> None:
        adapted.append(1)
        made(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceStepAdapters, "__init__", counted)
    with interpreter():
        engines = Engines(
            folder, pages, "auto", speculative=drafts if method else None, make_alone=made_alone, enable_lora=True,
            max_loras=SLOTS,
        )  # fmt: skip
        try:
            (engine,) = engines.engines
            assert isinstance(engine.inputs, TritonInputs)
            known = {
                handle: None if name is None else adapter_in(folder / "adapters", name, engine.resolved.spec)
                for handle, name in NAMES.items()
            }
            bench = served_with(engines, known, SLOTS)
            slots = engine.inputs.adapters
            assert slots is not None
            assert slots.count == SLOTS + 1
        finally:
            engines.close()
    assert all(len(tokens) == OUTPUT for tokens in bench.tokens.values())
    expected = {
        handle: greedy(peft, PROMPTS[min(handle, len(PROMPTS) - 1)], tokens, NAMES[handle])
        for handle, tokens in bench.tokens.items()
    }
    assert bench.tokens == expected
    return bench, len(adapted)


def test_tokens_are_pefts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three adapters in two slots and rows of the base, in chunks, with preemption and the prefix cache."""
    bench, adapted = served(tmp_path, 20, monkeypatch)
    assert bench.core.batching.num_preemptions > 0, "memory was to be too little"
    assert bench.tokens[AGAIN[0]] != bench.tokens[AGAIN[1]], "the adapters are to be no trifle"
    assert bench.cached[AGAIN[0]] > 0
    assert bench.cached[AGAIN[1]] == 0, "another adapter's KV is not this one's"
    assert adapted > 0


def test_drafts_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served(tmp_path, 64, monkeypatch, "ngram")
