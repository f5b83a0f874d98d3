"""Whole encoder layers in one call: encoder.h. What a prompt gets does not depend on the prompts beside it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.kernels.cpu import packed
from meshlm.kernels.cpu.kernel import spans
from meshlm.kernels.cpu.library import compute, step_type

ACTIVATIONS = {"gelu": 1, "gelu_pytorch_tanh": 2, "relu": 3}
LANES = 8


class EncoderWeights(NamedTuple):
    """The weights of one layer, in the order of encoder.h. Products are packed (packed.py)."""

    qkv: Tensor
    o: Tensor
    up: Tensor
    down: Tensor
    qkv_bias: Tensor
    o_bias: Tensor
    up_bias: Tensor
    down_bias: Tensor
    attention_norm: Tensor
    attention_shift: Tensor
    mlp_norm: Tensor
    mlp_shift: Tensor


class EncoderShape(NamedTuple):
    """The sizes of all layers. inner: inputs of down."""

    hidden: int
    inner: int
    heads: int
    d: int
    act: str
    scale: float
    eps: float


_Step = step_type(
    "layers positions tables spans x qkv query keys values attended sum wide rounded",
    "num_layers t hidden inner heads d stride num_spans act",
)


def takes(shape: EncoderShape) -> bool:
    """Whether the kernel is there for these sizes."""
    return shape.act in ACTIVATIONS and shape.hidden % LANES == 0 and shape.inner % LANES == 0


class EncoderLayers:
    def __init__(self, weights: Sequence[EncoderWeights], shape: EncoderShape) -> None:
        self._weights, self._shape = weights, shape  # keeps what is pointed at
        self._table = torch.tensor([[tensor.data_ptr() for tensor in layer] for layer in weights], dtype=torch.long)

    def run(self, x: Tensor, lens: Sequence[int]) -> Tensor:
        """x [t, hidden] float32, which is changed: the embeddings of prompts of these lengths. The states of the last layer."""
        shape, t, longest = self._shape, x.shape[0], max(lens)
        width = shape.heads * shape.d
        counts = torch.tensor(lens)
        begins = counts.cumsum(0) - counts
        tables = (begins[:, None] + torch.arange(longest)).contiguous()
        positions = torch.repeat_interleave(counts - 1, counts)
        together = spans(lens, 0, shape.heads, shape.heads)
        widths = dict.fromkeys(("query", "keys", "values", "attended"), width)
        widths |= {"qkv": 3 * width, "sum": shape.hidden, "wide": shape.inner}
        widths["rounded"] = packed.rounded_bytes(max(shape.hidden, width, shape.inner)) // 4
        buffers = {name: torch.empty(t, size) for name, size in widths.items()}
        buffers |= {"layers": self._table, "positions": positions, "tables": tables, "spans": together, "x": x}
        numbers = {"num_layers": len(self._weights), "t": t, "stride": longest, "num_spans": together.shape[0]}
        compute("meshlm_encoder", _Step, buffers, {**shape._asdict(), **numbers, "act": ACTIVATIONS[shape.act]})
        return x
