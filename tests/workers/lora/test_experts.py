"""Adapters of experts: the logits are those of peft's own modules, whichever way a family's files and transformers keep the experts."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
from adapters import LIMITS, adapter_in, save_adapters
from small_models import CPU, DEEPSEEK, GEMMA4, MOE, SMALL, batch_of, caches, load
from torch import Tensor

from meshlm.workers.attention.backend import choose
from meshlm.workers.lora.step_adapters import StepAdapters, TokensOfAdapter
from meshlm.workers.lora.weights import LoadedAdapter, load_adapter
from meshlm.workers.models.decoder import Decoder

BLOCK = 4
PROMPT = [(7 + 31 * at) % 200 for at in range(13)]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: MOE[name] for name in ("mixtral", "qwen2-moe-some", "qwen3-moe", "llama4", "gpt-oss")},
    **{name: DEEPSEEK[name] for name in ("deepseek-v2", "deepseek-v3")},
    **{name: case for name, case in GEMMA4.items() if "moe" in name},
}


def make(folder: Path, case: str) -> tuple[Any, Decoder]:
    import transformers

    torch.manual_seed(0)
    kind, extra = CASES[case]
    config = getattr(transformers, kind)(**{**SMALL, **extra})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    theirs.save_pretrained(folder)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    return theirs, load(folder)


def logits(model: Decoder, groups: list[TokensOfAdapter]) -> Tensor:
    batch = batch_of([(PROMPT, 0, list(range(1, 6)))])
    if groups:
        batch = dataclasses.replace(batch, adapters=StepAdapters(groups))
    backend = choose("cpu", model.spec, CPU, torch.float32, BLOCK)
    with torch.inference_mode():
        hidden = model(batch, caches(model.spec, 6), backend.step(batch, BLOCK))
        if batch.adapters is not None:
            batch.adapters.check()
        return model.logits(hidden)


def loaded_from(folder: Path, name: str, model: Decoder) -> LoadedAdapter:
    return load_adapter(adapter_in(folder, name, model.spec), model, LIMITS, (torch.float32,) * 2)


def check(theirs: Any, model: Decoder, loaded: LoadedAdapter) -> None:
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
        with theirs.disable_adapter():
            base = theirs(torch.tensor([PROMPT])).logits[0]
    assert (expected - base).abs().max() > 1e-3, "the adapter is to be no trifle"
    assert loaded.experts
    torch.testing.assert_close(logits(model, []), base, atol=2e-4, rtol=1e-3)
    for tokens in (None, torch.arange(len(PROMPT))):
        group = TokensOfAdapter(tokens, loaded.layers, experts=loaded.experts)
        torch.testing.assert_close(logits(model, [group]), expected, atol=2e-4, rtol=1e-3)
    first = TokensOfAdapter(torch.arange(4, len(PROMPT)), loaded.layers, experts=loaded.experts)
    torch.testing.assert_close(logits(model, [first])[:4], base[:4], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("which", ["both", "gate_up_proj", "down_proj"])
@pytest.mark.parametrize("case", CASES)
def test_parameters_of_all_experts(case: str, which: str, tmp_path: Path) -> None:
    theirs, model = make(tmp_path, case)
    names = [name for name, one in theirs.named_parameters() if ".experts." in name and one.dim() == 3]
    names = [name for name in names if which in ("both", name.rpartition(".")[2])]
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "target_parameters": names}
    if which == "both":
        settings |= {"rank_pattern": {"experts.down_proj": 2}, "alpha_pattern": {"experts.gate_up_proj": 5}}
    peft = save_adapters(theirs, tmp_path / "adapters", {"one": settings}, 0.1)
    check(peft, model, loaded_from(tmp_path / "adapters", "one", model))


OLD: dict[str, tuple[str, tuple[str, str, str]]] = {
    "mixtral": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3-moe": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # peft forgets parameters there
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
@pytest.mark.parametrize("case", OLD)
def test_experts_by_their_numbers(case: str, tmp_path: Path) -> None:
    """As peft wrote them for transformers 4, whose experts were linear layers, and as vLLM reads them. peft converts them."""
    import peft

    theirs, model = make(tmp_path, case)
    stem, (gate, up, down) = OLD[case]
    moe = model.spec.moe
    assert moe is not None
    wide, hidden, rank = moe.moe_intermediate_size, model.spec.hidden_size, 4
    sizes = {gate: (hidden, wide), up: (hidden, wide), down: (wide, hidden)}
    random, tensors = torch.Generator().manual_seed(3), dict[str, Tensor]()
    for layer in range(model.spec.num_hidden_layers):
        for expert in range(moe.num_experts):
            for name, (inputs, outputs) in sizes.items():
                key = f"base_model.model.model.layers.{layer}.{stem}.{expert}.{name}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) * 0.1
                tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * 0.1
    folder = tmp_path / "adapters" / "one"
    folder.mkdir(parents=True)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": list(sizes), "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    their_adapter = peft.PeftModel.from_pretrained(theirs, folder).eval()
    check(their_adapter, model, loaded_from(tmp_path / "adapters", "one", model))
