"""int-quantized checkpoints of compressed-tensors compute what the format says, whole and in shards."""

import json
from pathlib import Path

import pytest
import torch
from int8_models import KINDS, Kind, Reference, config_of
from packed_models import SIZES
from safetensors.torch import save_file
from sharded_models import load_shards, logits_of, together
from small_models import SMALL, caches, load, run
from torch import Tensor, nn

from meshlm.architectures.quantization import formats
from meshlm.kernels.quantise_int8.reference import int8_linear
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.workers.formats.eight_bits import Int8Format
from meshlm.workers.layers import cpu_ops

TABLE = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4]
TOKENS = torch.arange(30).mul(17).remainder(211).tolist()
UP = "model.layers.1.mlp.up_proj."


def write(folder: Path, kind: Kind) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SMALL, **SIZES})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        weight = module.weight.data
        scale = (weight.abs().amax(1, keepdim=True) if kind.strategy == "channel" else weight.abs().max()) / 127
        codes = (weight / scale).round().to(torch.int8)
        reference = Reference(codes, scale, kind, name)
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = codes, scale.clone()
        if reference.input_scale is not None:
            tensors[f"{name}.input_scale"] = reference.input_scale.reshape(1)
        if reference.input_zero is not None:
            tensors[f"{name}.input_zero_point"] = reference.input_zero.to(torch.int8).reshape(1)
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], reference)
    described = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": config_of(kind)}
    (folder / "config.json").write_text(json.dumps(described))
    save_file(tensors, folder / "model.safetensors")
    return model, tensors


def distance(found: Tensor, model: nn.Module) -> float:
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    return float((found - expected).abs().mean() / expected.std())


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_definition(
    name: str, native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, _ = write(tmp_path, KINDS[name])
    if native:
        monkeypatch.setattr(Int8Format, "native_weight", lambda self, matrix, given, dtype: self._weight(matrix, given))
        monkeypatch.setattr(Int8Format, "native_product", lambda self, x, weight, bias: int8_linear(x, weight, bias))
    monkeypatch.setattr(cpu_ops, "available", lambda: False)
    model = load(tmp_path)
    assert distance(run(model, caches(model.spec, 24), [(TOKENS, 0, TABLE)]), theirs) < 0.02


@pytest.mark.parametrize("name", ["static-zeros", "dynamic", "dynamic-zeros"])
def test_shards(name: str, tmp_path: Path) -> None:
    """A static scale is everybody's; a token's is found by each rank of its own share of the inputs."""
    theirs, _ = write(tmp_path, KINDS[name])
    for path, module in theirs.named_modules():
        if isinstance(module, Reference) and path.endswith(("o_proj", "down_proj")):
            module.ranks = 2
    found = together(load_shards(tmp_path, 2, 1), lambda model, comm: logits_of(model, comm, TOKENS))
    assert distance(found[0], theirs) < 0.02


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({UP + "weight_scale": None}, r"1 tensor missing: layers\.1\.mlp\.up_proj\.weight_scale"),
        ({UP + "input_zero_point": None}, r"1 tensor missing: layers\.1\.mlp\.up_proj\.input_zero_point"),
        ({UP + "input_scale": torch.tensor([torch.nan])}, "up_proj.input_scale: a scale must be a positive number"),
        ({UP + "weight": torch.ones(128, 64)}, r"of a type that is not read .*up_proj.weight \(F32\)"),
        ({"lm_head.weight": torch.ones(211, 64, dtype=torch.int8)}, "lm_head.weight is of type I8"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Tensor | None], said: str, tmp_path: Path) -> None:
    _, tensors = write(tmp_path, KINDS["static-zeros"])
    kept = {**tensors, **changed}
    save_file({key: tensor for key, tensor in kept.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises((ProcessFatal, ModelFilesError), match=said):
        load(tmp_path)


def test_weights_of_integers_alone_are_packed_ones() -> None:
    config = config_of(KINDS["dynamic"])
    config["config_groups"]["group_0"]["input_activations"] = None
    with pytest.raises(ValueError, match="input_activations must be there for weights of 8-bit integers"):
        formats()["compressed-tensors"].read(config)
