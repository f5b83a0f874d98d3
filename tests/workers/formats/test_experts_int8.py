"""Experts that are quantised to 8-bit integers while they are loaded, held against a model whose weights have those values."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from packed_models import SIZES
from safetensors.torch import save_file
from small_models import CPU, SMALL, caches, run
from torch import Tensor

from meshlm.kernels.packed_experts.layout import ExpertWeight
from meshlm.protocol.config import Resolved
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.formats.experts_int8 import encode
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights import layer_formats
from meshlm.workers.weights.load import load_model
from meshlm.workers.weights.reload import reload_weights

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "head_dim": 16,
    "num_attention_heads": 8,
}
TOKENS = torch.arange(30).mul(17).remainder(211).tolist()
TABLE = [7, 3, 11, 0, 5, 9, 1, 2, 8, 4]


def rounded(weight: Tensor) -> Tensor:
    """The values that vLLM's formula leaves: 8-bit integers, a scale for each output."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def write(folder: Path, said: dict[str, str] | None, *, by_hand: bool = False, dense: bool = False) -> Path:
    """A plain checkpoint; by_hand: whose experts' weights are rounded already."""
    import transformers

    torch.manual_seed(3)
    config = (transformers.Qwen3Config if dense else transformers.Qwen3MoeConfig)(
        **{**SMALL, **SIZES, **({} if dense else EXPERTS)}
    )
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    tensors = {name: tensor for name, tensor in model.state_dict().items() if ".mlp.experts." not in name}
    for layer in range(0 if dense else config.num_hidden_layers):
        for expert in range(EXPERTS["num_experts"]):
            for name, shape in {"gate": (128, 64), "up": (128, 64), "down": (64, 128)}.items():
                weight = torch.randn(shape) * 0.2
                tensors[f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight"] = (
                    rounded(weight) if by_hand else weight
                )
    described = {**config.to_dict(), "architectures": [type(model).__name__]} | (
        {"quantization_config": said} if said else {}
    )
    folder.mkdir()
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(described))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def resolved(folder: Path, quantization: str = "") -> Resolved:
    values: dict[str, object] = {
        "model": str(folder),
        "device": "cpu",
        "dtype": "float32",
        "quantization": quantization,
    }
    found = resolve.resolve(flags.build(values | {"max_model_len": 128, "max_num_seqs": 8}, None)).resolved
    assert found is not None
    return found


def load(folder: Path, quantization: str = "") -> Decoder:
    with torch.inference_mode():
        return load_model(resolved(folder, quantization), CPU, 0, lambda done, total: None)


def logits(model: Decoder) -> Tensor:
    return run(model, caches(model.spec, 24), [(TOKENS, 0, TABLE)])


@pytest.mark.parametrize("said", [None, {"quant_method": "experts_int8"}], ids=["flag", "config.json"])
def test_logits_are_those_of_the_rounded_weights(said: dict[str, str] | None, tmp_path: Path) -> None:
    """To the last bit: all else is plain."""
    quantised = load(write(tmp_path / "a", said), "experts_int8")
    by_hand, plain = load(write(tmp_path / "b", None, by_hand=True)), load(write(tmp_path / "c", None))
    assert torch.equal(logits(quantised), logits(by_hand))
    assert not torch.equal(logits(quantised), logits(plain))


def test_codes_that_are_kept_stand_for_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; also after the weights are read again."""
    decoded = logits(load(write(tmp_path / "a", None), "experts_int8"))
    monkeypatch.setattr(layer_formats, "why_decoded", lambda *given: "")
    ours = load(tmp_path / "a", "experts_int8")
    for layer in (layer for mixture in ours.mixtures() for layer in mixture.experts.linears()):
        weight = layer.grouped().kernel
        assert isinstance(weight, ExpertWeight)
        assert weight.format.bits == 8
    torch.testing.assert_close(logits(ours), decoded, atol=1e-5, rtol=1e-5)
    reload_weights(ours, resolved(tmp_path / "a", "experts_int8"), CPU, 0, pass_bytes=1)
    torch.testing.assert_close(logits(ours), decoded, atol=1e-5, rtol=1e-5)


def test_codes_and_scales_are_of_vllms_formula() -> None:
    weight = torch.tensor([[1.0, -2.0, 0.5, 2.0], [0.0, 0.0, 0.0, 0.0], [1e-3, -1e-3, 5e-4, 0.0]])
    found = encode(weight)
    assert found["weight"].tolist() == [[192, 1, 160, 255], [128] * 4, [255, 1, 192, 128]]
    torch.testing.assert_close(found["weight_scale"][:, 0], torch.tensor([2 / 127, 1e-12, 1e-3 / 127]))


def test_what_it_is_not_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--quantization experts_int8: the model of .* has none of the layers that it quantises"
    ):
        resolved(write(tmp_path / "b", None, dense=True), "experts_int8")
    other = write(tmp_path / "a", {"quant_method": "fp8", "activation_scheme": "dynamic"})
    with pytest.raises(
        UsageError, match=r"--quantization experts_int8: the weights of .* are quantised with fp8; leave it out"
    ):
        resolved(other, "experts_int8")
