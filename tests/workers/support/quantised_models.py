"""Small FP8 checkpoints, and transformers' model with the formats' definition in place of its linear layers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from small_models import SMALL
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
MAX = 448.0
INPUT_SCALES = {"q_proj": 0.02, "k_proj": 0.02, "v_proj": 0.013}  # one product here; the others': 0.02


LARGER: dict[str, Any] = {
    "vocab_size": 4099, "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 384,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.08,
}  # fmt: skip
"""Sizes that GPUs' kernels know, with several blocks of 128, and some that are no whole ones."""


class Quantised(NamedTuple):
    """One kind of checkpoint."""

    config: dict[str, Any]
    weight: str = "tensor"
    activation: str = "token"
    block: tuple[int, int] = (0, 0)
    scale: str = "weight_scale"
    ignore: tuple[str, ...] = ()
    head: bool = False  # lm_head is quantised too


def quantised(weight: Tensor, kind: Quantised) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales as a file has them, and the values that they stand for."""
    outputs, inputs = weight.shape
    match kind.weight:
        case "tensor":
            scale = each = weight.abs().max() / MAX
        case "channel":
            scale = each = weight.abs().amax(dim=1, keepdim=True) / MAX
        case _:
            rows, columns = kind.block
            scale = torch.stack(
                [
                    torch.stack([part.abs().max() / MAX for part in line.split(columns, dim=1)])
                    for line in weight.split(rows)
                ]
            )
            each = scale.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
    codes = (weight / each).to(FP8)
    return codes, scale, codes.float() * each


def rounded(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).clamp(-MAX, MAX).to(FP8).float() * scale


class Reference(nn.Module):
    """y = (x_q s_x) (w_q s_w)^T + b, group by group. Values are rounded to FP8 in float32, whatever the model computes in."""

    values: Tensor
    bias: Tensor | None

    def __init__(self, values: Tensor, bias: Tensor | None, kind: Quantised, input_scale: float) -> None:
        super().__init__()
        self.ranks = 1  # that have a share of the inputs each, and so find a token's scale of it
        self.register_buffer("values", values)
        self.register_buffer("bias", bias)
        self.kind, self.input_scale = kind, input_scale

    def forward(self, given: Tensor) -> Tensor:
        x = given.float()
        match self.kind.activation:
            case "static":
                x = rounded(x, self.input_scale)
            case "token":
                shares = x.chunk(self.ranks, dim=-1)
                x = torch.cat([rounded(share, share.abs().amax(dim=-1, keepdim=True) / MAX) for share in shares], -1)
            case "group":
                groups = x.split(self.kind.block[1], dim=-1)
                x = torch.cat([rounded(group, group.abs().amax(dim=-1, keepdim=True) / MAX) for group in groups], -1)
        return nn.functional.linear(x.to(given.dtype), self.values, self.bias)


def write(folder: Path, kind: Quantised, **changes: object) -> tuple[nn.Module, dict[str, Tensor]]:
    """The checkpoint, what it must compute, and its tensors."""
    import transformers

    torch.manual_seed(0)
    family = changes.pop("family", "Llama")
    config = getattr(transformers, f"{family}Config")(
        **{**SMALL, "attention_bias": True, "initializer_range": 0.2, **changes}
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or any(one in name for one in kind.ignore):
            continue
        if name == "lm_head" and not kind.head:
            continue
        codes, scale, values = quantised(module.weight.data, kind)
        tensors[f"{name}.weight"], tensors[f"{name}.{kind.scale}"] = codes, scale.clone()
        last = name.rpartition(".")[2]
        input_scale = INPUT_SCALES.get(last, 0.02)
        if kind.activation == "static":
            tensors[f"{name}.input_scale"] = torch.tensor(input_scale)
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, last, Reference(values, None if module.bias is None else module.bias.data, kind, input_scale))
    described = {**config.to_dict(), "architectures": [f"{family}ForCausalLM"], "quantization_config": kind.config}
    (folder / "config.json").write_text(json.dumps(described))
    save_file(tensors, folder / "model.safetensors")
    return model, tensors


def fp8(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **changes}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
    def arguments(given: dict[str, Any]) -> dict[str, Any]:
        return {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "observer": "minmax", **given}

    group = {
        "targets": ["Linear"],
        "weights": arguments({"dynamic": False, **weights}),
        "input_activations": inputs and arguments(inputs),
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "version": "0.9",
        **changes,
    }


KINDS = {
    "fp8-dynamic": Quantised(fp8()),
    "fp8-static": Quantised(fp8(activation_scheme="static"), activation="static"),
    "fp8-blocks": Quantised(
        fp8(weight_block_size=[32, 16]), weight="block", activation="group", block=(32, 16), scale="weight_scale_inv"
    ),
    "fp8-128": Quantised(
        fp8(weight_block_size=[128, 128]),
        weight="block",
        activation="group",
        block=(128, 128),
        scale="weight_scale_inv",
    ),
    "fp8-fine": Quantised(
        fp8(weight_block_size=[16, 8]), weight="block", activation="group", block=(16, 8), scale="weight_scale_inv"
    ),
    "fp8-some": Quantised(fp8(modules_to_not_convert=["lm_head", "model.layers.1.mlp"]), ignore=("layers.1.mlp",)),
    "compressed-channel": Quantised(
        compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True}), weight="channel"
    ),
    "compressed-static": Quantised(
        compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False}), activation="static"
    ),
    "compressed-weights": Quantised(
        compressed({"strategy": "channel"}, None, ignore=["lm_head", "re:.*self_attn.*"]),
        weight="channel",
        activation="none",
        ignore=("self_attn",),
    ),
    "compressed-head": Quantised(
        compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True}, ignore=[]),
        weight="channel",
        head=True,
    ),
    "compressed-blocks": Quantised(
        compressed(
            {"strategy": "block", "block_structure": [16, 16]}, {"strategy": "group", "group_size": 16, "dynamic": True}
        ),
        weight="block",
        activation="group",
        block=(16, 16),
    ),
}
