"""Weights of the compute dtype, and those of a .gguf file whose rows stay encoded in a CPU worker's memory."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.workers.formats.format import (
    GroupedWeight,
    KernelWeight,
    ProductOps,
    WeightedLayer,
    WeightFormat,
    grouped_weight,
)


class Unquantized(WeightFormat):
    """Every fused kernel takes such a weight."""

    @property
    def is_fusible(self) -> bool:
        return True

    def add_parameters(self, layer: WeightedLayer) -> None:
        layer.add("weight", layer.outputs, layer.inputs)

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        if not layer.stack:
            layer.keep("weight", ops.pack(layer.weight))

    def values(self, layer: WeightedLayer) -> Tensor:
        return layer.weight.data

    def apply(self, layer: WeightedLayer, x: Tensor, ops: ProductOps) -> Tensor:
        return ops.linear(x, layer.weight, layer.bias, layer.outputs)

    def expert_linear(self, layer: WeightedLayer, number: int, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, layer.weight[number], bias)

    def expert_kernel(self, layer: WeightedLayer) -> KernelWeight:
        return layer.weight


class PackedGGUF(Unquantized):
    """The weight is uint8 of this size: panels of the file's codes and scales, which the CPU's kernels read as they are."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._linear: Callable[[Tensor, Tensor, Tensor | None, int], Tensor] | None = None

    def add_parameters(self, layer: WeightedLayer) -> None:
        layer.add("weight", self._size, dtype=torch.uint8)

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        """The loader has packed it."""
        self._linear = ops.linear

    def expert_linear(self, layer: WeightedLayer, number: int, x: Tensor, bias: Tensor | None) -> Tensor:
        assert self._linear is not None
        return self._linear(x, layer.weight[number], bias, layer.outputs)


UNQUANTIZED = Unquantized()


def plain_experts(weight: Tensor) -> GroupedWeight:
    """The products of experts with these weights [experts, outputs, inputs]."""
    experts, outputs, inputs = weight.shape
    return grouped_weight(UNQUANTIZED, (experts, outputs, inputs), weight.dtype, weight=weight)
