"""Every family's linear layers with an adapter of peft: the logits are those of peft's modules, and all layers were asked for it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from adapters import LIMITS, adapter_in, save_adapters
from small_models import CLASSIC, CPU, DEEPSEEK, DENSE, GEMMA, GEMMA3N, GEMMA4, MOE, SMALL, batch_of, caches, load
from torch import Tensor

from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.adapter_files import why_not
from meshlm.workers.attention.backend import choose
from meshlm.workers.lora.step_adapters import StepAdapters, TokensOfAdapter
from meshlm.workers.lora.weights import load_adapter
from meshlm.workers.models.decoder import Decoder

BLOCK = 4
PROMPT = [(7 + 31 * at) % 200 for at in range(13)]
NAMES = {
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "Wqkv", "c_attn", "o_proj", "dense", "out_proj", "q_b_proj"),
    *(
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "down_proj",
        "fc1",
        "fc2",
        "c_fc",
        "c_proj",
        "dense_h_to_4h",
        "dense_4h_to_h",
    ),
}
"""The last words of modules that may be linear layers of attention or of an MLP."""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", {"head_dim": 16, "hidden_act": "gelu", "initializer_range": 0.2}),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "gemma3n": ("Gemma3nTextConfig", GEMMA3N),
    **GEMMA4,
    **DENSE,
    **CLASSIC,
    **{name: MOE[name] for name in ("mixtral", "qwen2-moe", "llama4", "gpt-oss")},
    **DEEPSEEK,
}
CASES.pop("falcon-rw")  # whose mask transformers forgets (tests/workers/models/test_models.py)


def logits(model: Decoder, groups: list[TokensOfAdapter]) -> Tensor:
    table = list(range(1, 6))
    batch = batch_of([(PROMPT, 0, table)])
    if groups:
        batch = dataclasses.replace(batch, adapters=StepAdapters(groups))
    backend = choose("cpu", model.spec, CPU, torch.float32, BLOCK)
    with torch.inference_mode():
        hidden = model(batch, caches(model.spec, 6), backend.step(batch, BLOCK))
        if batch.adapters is not None:
            batch.adapters.check()
        return model.logits(hidden)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dora", [False, True])
def test_logits_are_pefts(case: str, dora: bool, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    kind, extra = CASES[case]
    config = getattr(transformers, kind)(**{**SMALL, **extra})
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    theirs.save_pretrained(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    model = load(tmp_path)
    if why_not(model.spec):
        pytest.skip("it takes none")
    kinds = {name: type(module).__name__ for name, module in theirs.named_modules()}
    names = [
        name
        for name, kind in kinds.items()
        if kind in ("Linear", "FalconLinear", "Conv1D") and name.rpartition(".")[2] in NAMES
    ]
    if case in DEEPSEEK or any(".experts" in name for name in kinds):  # peft takes an MLP's names for those of experts
        names = [name for name in names if ".mlp." not in name]
    settings = {"r": 4, "lora_alpha": 8, "target_modules": names, "fan_in_fan_out": "Conv1D" in kinds.values()}
    settings["use_dora"] = dora
    peft = save_adapters(theirs, tmp_path / "adapters", {"one": settings}, 0.1)
    loaded = load_adapter(adapter_in(tmp_path / "adapters", "one", model.spec), model, LIMITS, (torch.float32,) * 2)
    with torch.no_grad():
        expected = peft(torch.tensor([PROMPT])).logits[0]
        with peft.disable_adapter():
            base = peft(torch.tensor([PROMPT])).logits[0]
    assert (expected - base).abs().max() > 1e-3, "the adapter is to be no trifle"
    torch.testing.assert_close(logits(model, []), base, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(logits(model, [TokensOfAdapter(None, loaded.layers)]), expected, atol=2e-4, rtol=1e-3)
    some = torch.arange(len(PROMPT))
    torch.testing.assert_close(logits(model, [TokensOfAdapter(some, loaded.layers)]), expected, atol=2e-4, rtol=1e-3)


def test_rows_that_stand_by_group_are_refused(tmp_path: Path) -> None:
    """query_key_value of these families has a query, a key and a value of each head behind one another."""
    import transformers

    kind, extra = CLASSIC["bloom"]
    theirs = (
        transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**{**SMALL, **extra})).eval().float()
    )
    theirs.save_pretrained(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    spec = load(tmp_path).spec
    save_adapters(theirs, tmp_path / "adapters", {"one": {"target_modules": ["query_key_value"]}})
    with pytest.raises(
        ModelFilesError, match=r"query_key_value: this model .BloomForCausalLM. has no such module, or none"
    ):
        adapter_in(tmp_path / "adapters", "one", spec)
