"""Checkpoints of 8-bit integers, and what their linear layers compute."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshlm.kernels.quantise_int8.reference import Int8Weight, int8_linear


class Kind(NamedTuple):
    inputs: dict[str, Any]
    strategy: str = "channel"


DYNAMIC = {"strategy": "token", "dynamic": True, "symmetric": True}
STATIC = {"strategy": "tensor", "dynamic": False, "symmetric": True}
KINDS = {
    "dynamic": Kind(DYNAMIC),
    "dynamic-zeros": Kind(DYNAMIC | {"symmetric": False}),
    "static": Kind(STATIC, "tensor"),
    "static-zeros": Kind(STATIC | {"symmetric": False}),
}


def config_of(kind: Kind) -> dict[str, Any]:
    integers = {"num_bits": 8, "type": "int"}
    group = {
        "targets": ["Linear"],
        "weights": {**integers, "symmetric": True, "strategy": kind.strategy, "dynamic": False},
        "input_activations": {**integers, **kind.inputs},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


class Reference(nn.Module):
    """The format's definition, in float32."""

    def __init__(self, codes: Tensor, scale: Tensor, kind: Kind, name: str) -> None:
        super().__init__()
        known = not kind.inputs["dynamic"]
        self.input_scale = torch.tensor(0.05 if "v_proj" in name else 0.06) if known else None
        self.input_zero = (
            torch.tensor(3.0 if "down" in name else -5.0) if known and not kind.inputs["symmetric"] else None
        )
        rows = scale.reshape(-1, 1).expand(len(codes), 1)
        self.ranks = 1  # that have a share of the inputs each, and so find a token's scale of it
        self.kind = Int8Weight(codes, rows, torch.empty(0), kind.inputs["symmetric"], self.input_scale, self.input_zero)

    def forward(self, x: Tensor) -> Tensor:
        shares = x.flatten(0, -2).chunk(self.ranks, 1), self.kind.codes.chunk(self.ranks, 1)
        found = [int8_linear(part, self.kind._replace(codes=codes)) for part, codes in zip(*shares, strict=True)]
        return torch.stack(found).sum(0).view(*x.shape[:-1], -1)
