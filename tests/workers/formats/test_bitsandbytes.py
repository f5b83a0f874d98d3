"""bitsandbytes' 4-bit checkpoints compute what their tables say, also with scales that are quantised; floats become such codes."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from bitsandbytes_states import CONFIG, state_of
from packed_models import SIZES
from safetensors.torch import save_file
from sharded_models import load_shards, logits_of, together
from small_models import SMALL, caches, load, resolved, run
from torch import Tensor, nn

from meshlm.architectures.quantization import formats
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.workers.weights.load import load_model

TABLE = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4]
TOKENS = torch.arange(30).mul(17).remainder(211).tolist()
UP = "model.layers.1.mlp.up_proj.weight"


def write(folder: Path, kind: str, *, nested: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, **SIZES})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            found, module.weight.data = state_of(module.weight.data, kind, nested=nested)
            tensors[f"{name}.weight"] = found.pop("codes")
            tensors |= {f"{name}.weight.{part}": tensor for part, tensor in found.items()}
    described = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    described["quantization_config"] = CONFIG | {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    (folder / "config.json").write_text(json.dumps(described))
    save_file(tensors, folder / "model.safetensors")
    return model, tensors


def expected_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


@pytest.mark.parametrize(("kind", "nested"), [("nf4", False), ("nf4", True), ("fp4", True)])
def test_logits_are_those_of_the_values(kind: str, nested: bool, tmp_path: Path) -> None:
    theirs, _ = write(tmp_path, kind, nested=nested)
    expected, model = expected_of(theirs), load(tmp_path)
    torch.testing.assert_close(run(model, caches(model.spec, 24), [(TOKENS, 0, TABLE)]), expected, atol=5e-3, rtol=5e-3)
    if nested and kind == "nf4":
        return
    with pytest.raises(ProcessFatal, match="o_proj has 32 inputs on a rank, no multiple of the 64"):
        load_shards(tmp_path, 2, 1)


def test_shards(tmp_path: Path) -> None:
    """Ranks have whole blocks of their inputs."""
    sizes = dict(SIZES)
    SIZES.update(hidden_size=128, intermediate_size=256)
    try:
        theirs, _ = write(tmp_path, "nf4", nested=True)
    finally:
        SIZES.update(sizes)
    found = together(load_shards(tmp_path, 2, 1), lambda model, comm: logits_of(model, comm, TOKENS))
    torch.testing.assert_close(found[0], expected_of(theirs), atol=1e-2, rtol=1e-2)


def test_floats_become_codes_while_they_are_loaded(tmp_path: Path) -> None:
    theirs, tensors = write(tmp_path, "nf4", nested=False)
    expected = expected_of(theirs)
    import transformers

    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(theirs.config, attn_implementation="eager").float()
    save_file({name: tensor.clone() for name, tensor in plain.state_dict().items()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = resolved(tmp_path)
    spec = msgspec.structs.replace(found.spec, quantization=formats()["bitsandbytes"].online)
    with torch.inference_mode():
        model = load_model(msgspec.structs.replace(found, spec=spec), torch.device("cpu"), 0, lambda done, total: None)
    torch.testing.assert_close(run(model, caches(spec, 24), [(TOKENS, 0, TABLE)]), expected, atol=5e-3, rtol=5e-3)
    assert UP in tensors


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({f"{UP}.absmax": None}, r"1 tensor missing: model.layers.1.mlp.up_proj.weight.absmax"),
        ({f"{UP}.nested_absmax": None}, r"1 tensor missing: model.layers.1.mlp.up_proj.weight.nested_absmax"),
        ({f"{UP}.quant_state.bitsandbytes__nf4": None}, r"1 tensor missing: .*up_proj.weight.quant_state.bitsandbytes__"),
        ({f"{UP}.quant_state.bitsandbytes__nf4": torch.ones(4, dtype=torch.uint8)}, "quant_state cannot be read"),
        ({f"{UP}.quant_map": torch.ones(16)}, "quant_map holds other numbers than those of nf4"),
        ({f"{UP}.nested_quant_map": torch.full((256,), torch.nan)}, "weight_scale: a scale must be a number"),
        ({UP: torch.ones(64, 64)}, "of a type that is not read .*up_proj.weight"),
        ({UP: torch.ones(64, 1, dtype=torch.uint8)}, r"up_proj.weight \(64, 1\) instead of \(4096, 1\)"),
        ({"lm_head.weight": torch.ones(4, 4, dtype=torch.uint8)}, "lm_head.weight is of type U8"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(changed: dict[str, Tensor | None], said: str, tmp_path: Path) -> None:
    _, tensors = write(tmp_path, "nf4", nested=True)
    kept = {**tensors, **changed}
    save_file({key: tensor for key, tensor in kept.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises((ProcessFatal, ModelFilesError), match=said):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"load_in_8bit": True, "load_in_4bit": False}, "load_in_8bit True is not supported"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type 'int4' is not supported; supported: nf4, fp4"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage 'bfloat16'"),
        ({"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight True"),
    ],
)
def test_settings_that_are_not_honoured(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        formats()["bitsandbytes"].read(CONFIG | changes)
