"""Small GPTQ, AWQ and compressed-tensors checkpoints, written as the formats' own packages lay them out, and what they must compute."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from small_models import SMALL
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
    "initializer_range": 0.2,
}  # fmt: skip


class Packed(NamedTuple):
    """One kind of checkpoint."""

    config: dict[str, Any]
    files: str  # gptq, gptq_v2, awq, compressed-tensors
    bits: int = 4
    group: int = 32
    symmetric: bool = False
    act_order: bool = False
    ignore: tuple[str, ...] = ()
    head: bool = False  # lm_head is quantised too


def words_of(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes [rows, n] -> int32 [rows, n * bits / 32]; order: which code each field of a word takes."""
    each = 32 // bits
    words = torch.zeros(codes.shape[0], codes.shape[1] // each, dtype=torch.int64)
    for field, code in enumerate(order or range(each)):
        words |= codes[:, code::each].long() << bits * field
    return (words & 0xFFFFFFFF).sub((words >> 31 & 1) << 32).to(torch.int32)


def quantised(weight: Tensor, kind: Packed, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [outputs, inputs], scales and zero points [outputs, groups], and the values that they stand for."""
    most, count = (1 << kind.bits) - 1, int(groups.max()) + 1
    scales, zeros = torch.zeros(len(weight), count), torch.zeros(len(weight), count)
    for group in range(count):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if kind.symmetric:
            scales[:, group] = torch.maximum(-low, high) * 2 / most
            zeros[:, group] = (most + 1) / 2
        else:
            scales[:, group] = (high - low) / most
            zeros[:, group] = (-low / scales[:, group]).round().clamp(1, most)
    scales = scales.half().float()
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, most)
    return codes, scales, zeros, (codes - zeros[:, groups]) * scales[:, groups]


def tensors_of(kind: Packed, stem: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What a file has in the place of a weight, and the weight's values."""
    outputs, inputs = weight.shape
    size = inputs if kind.group == -1 else kind.group
    groups = torch.arange(inputs) // size
    if kind.act_order:  # the same for all that have the same inputs
        seed = (
            1
            if ".self_attn." in stem and "o_proj" not in stem
            else 2
            if "up_proj" in stem or "gate_proj" in stem
            else 3
        )
        expert = re.search(r"experts\.(\d+)", stem)
        seed += 0 if expert is None else 3 * int(expert[1])
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    codes, scales, zeros, values = quantised(weight, kind, groups)
    match kind.files:
        case "gptq" | "gptq_v2":
            stored = zeros - 1 if kind.files == "gptq" else zeros
            found = {
                "qweight": words_of(codes, kind.bits).t().contiguous(),
                "qzeros": words_of(stored.t(), kind.bits),
                "scales": scales.t().half().contiguous(),
                "g_idx": groups.to(torch.int32),
            }
        case "awq":
            order = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's order_map
            found = {
                "qweight": words_of(codes.t(), 4, order),
                "qzeros": words_of(zeros.t(), 4, order),
                "scales": scales.t().half().contiguous(),
            }
        case "mxfp4":
            return of_mxfp4(stem, weight)
        case _:
            found = {
                "weight_packed": words_of(codes, kind.bits),
                "weight_scale": scales.half(),
                "weight_shape": torch.tensor([outputs, inputs]),
            }
            if not kind.symmetric:
                found["weight_zero_point"] = words_of(zeros.t(), kind.bits).t().contiguous()
            if kind.act_order:
                found["weight_g_idx"] = groups.to(torch.int32)
    return {f"{stem}.{name}": tensor.contiguous() for name, tensor in found.items()}, values


def of_mxfp4(stem: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """As compressed-tensors writes it: a byte of two codes, exponents that leave the largest number of a group below 8."""
    parts = weight.unflatten(1, (-1, 32))
    exponents = parts.abs().amax(-1).log2().floor().sub(2).add(127).to(torch.uint8)
    known = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = parts / torch.exp2(exponents.float() - 127)[..., None]
    codes = (scaled.abs()[..., None] - known).abs().argmin(-1)
    values = known[codes] * scaled.sign() * torch.exp2(exponents.float() - 127)[..., None]
    codes = (codes | (scaled < 0).long() << 3).flatten(1).to(torch.uint8)
    found = {f"{stem}.weight_packed": codes[:, ::2] | codes[:, 1::2] << 4, f"{stem}.weight_scale": exponents}
    return found, values.flatten(1)


_made: dict[str, tuple[nn.Module, dict[str, Tensor], dict[str, Any]]] = {}


def write(folder: Path, kind: Packed, **changes: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """The checkpoint, transformers' model with the values that it stands for, and its tensors. Models are made once."""
    key = repr((kind, changes))
    if key not in _made:
        _made[key] = _make(kind, changes)
    model, tensors, described = _made[key]
    (folder / "config.json").write_text(json.dumps(described))
    save_file(tensors, folder / "model.safetensors")
    return model, tensors


def _make(kind: Packed, given: dict[str, Any]) -> tuple[nn.Module, dict[str, Tensor], dict[str, Any]]:
    import transformers

    changes = dict(given)
    torch.manual_seed(0)
    family = changes.pop("family", "Llama")
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or any(one in name for one in kind.ignore):
            continue
        if name == "lm_head" and not kind.head:
            continue
        del tensors[f"{name}.weight"]
        found, values = tensors_of(kind, name, module.weight.data)
        tensors |= found
        module.weight.data = values
    described = {**config.to_dict(), "architectures": [f"{family}ForCausalLM"], "quantization_config": kind.config}
    return model, tensors, described


def gptq(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": False,
        "damp_percent": 0.1,
        **changes,
    }


def awq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", **changes}


def pack_quantized(**changes: Any) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
        **changes,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        "ignore": ["lm_head"],
    }


def mxfp4(**changes: Any) -> dict[str, Any]:
    found = pack_quantized(type="float", scale_dtype="torch.uint8", **changes)
    return {**found, "format": "mxfp4-pack-quantized"}


KINDS = {
    "gptq": Packed(gptq(sym=True), "gptq", symmetric=True),
    "gptq-zeros": Packed(gptq(), "gptq"),
    "gptq-v2": Packed(gptq(checkpoint_format="gptq_v2", group_size=64), "gptq_v2", group=64),
    "gptq-act-order": Packed(gptq(desc_act=True, group_size=32), "gptq", act_order=True),
    "gptq-8": Packed(gptq(bits=8, group_size=-1), "gptq", bits=8, group=-1),
    "awq": Packed(awq(), "awq"),
    "awq-some": Packed(awq(group_size=64, modules_to_not_convert=["layers.1.mlp"]), "awq", group=64, ignore=("layers.1.mlp",)),
    "mxfp4": Packed(mxfp4(), "mxfp4"),
    "w4a16": Packed(pack_quantized(), "compressed-tensors", symmetric=True),
    "w4a16-zeros": Packed(pack_quantized(symmetric=False), "compressed-tensors"),
    "w4a16-order": Packed(pack_quantized(actorder="group"), "compressed-tensors", symmetric=True, act_order=True),
    "w8a16": Packed(
        pack_quantized(num_bits=8, strategy="channel", group_size=None), "compressed-tensors", bits=8, group=-1, symmetric=True
    ),
}  # fmt: skip
