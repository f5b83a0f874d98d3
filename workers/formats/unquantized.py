"""Weights of the compute dtype, and those of a .gguf file whose rows stay encoded in a CPU worker's memory."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from meshlm.workers.formats.format import Encode, Fused

if TYPE_CHECKING:
    from meshlm.workers.layers.linear import Linear
    from meshlm.workers.layers.ops import Ops


class Unquantized:
    """See `meshlm.workers.formats.format.WeightFormat`. Every fused kernel takes such a weight."""

    encode: Encode | None = None

    def add_parameters(self, linear: "Linear") -> None:
        linear.weight = nn.Parameter(torch.empty(linear.outputs, linear.inputs), requires_grad=False)

    def finish(self, linear: "Linear", ops: "Ops") -> None:
        linear.weight = nn.Parameter(ops.pack(linear.weight), requires_grad=False)

    def values(self, linear: "Linear") -> Tensor:
        return linear.weight.data

    def apply(self, linear: "Linear", x: Tensor, ops: "Ops") -> Tensor:
        return ops.linear(x, linear.weight, linear.bias, linear.outputs)

    def variant(self) -> object:
        return None

    def warm_rows(self) -> set[int]:
        """Its kernels belong to the ops, which are asked by their tables."""
        return set()

    def fused(self, kind: Fused) -> bool:
        return True


class PackedGGUF(Unquantized):
    """The weight is uint8 of this size: panels of the file's codes and scales, which the CPU's kernels read as they are."""

    def __init__(self, size: int) -> None:
        self._size = size

    def add_parameters(self, linear: "Linear") -> None:
        linear.weight = nn.Parameter(torch.empty(self._size, dtype=torch.uint8), requires_grad=False)

    def finish(self, linear: "Linear", ops: "Ops") -> None:
        """The loader has packed it."""


UNQUANTIZED = Unquantized()
