"""Experts of a checkpoint that has them as MXFP4: kept so on a GPU, where kernels/packed_experts decodes what it multiplies."""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.packed_experts.layout import ExpertWeight, chunks_of, encode_mxfp4, unpack
from meshlm.workers.formats.format import (
    Encode,
    GroupedWeight,
    KernelWeight,
    ProductOps,
    WeightedLayer,
    WeightFormat,
    grouped_weight,
)


class MXFP4Format(WeightFormat):
    """Codes and scales as kernels read them; floats become so while they are loaded."""

    encode: Encode | None = staticmethod(encode_mxfp4)

    def add_parameters(self, layer: WeightedLayer) -> None:
        chunks = chunks_of(layer.inputs)
        layer.add("weight", layer.outputs, chunks * 64, dtype=torch.uint8)
        layer.add("weight_scale", layer.outputs, chunks * 4, dtype=torch.uint8)

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        """The loader has packed it."""

    def weight(self, layer: WeightedLayer) -> ExpertWeight:
        return ExpertWeight(layer.weight.data.view(torch.int16), layer.get_parameter("weight_scale").data, layer.inputs)

    def values(self, layer: WeightedLayer) -> Tensor:
        return unpack(self.weight(layer), layer.dtype)

    def apply(self, layer: WeightedLayer, x: Tensor, ops: ProductOps) -> Tensor:
        return ops.linear(x, self.values(layer), layer.bias, layer.outputs)

    def expert_linear(self, layer: WeightedLayer, number: int, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, unpack(self.weight(layer).of_expert(number), x.dtype), bias)

    def expert_kernel(self, layer: WeightedLayer) -> KernelWeight:
        return self.weight(layer)


def mxfp4_experts(weight: ExpertWeight, dtype: torch.dtype) -> GroupedWeight:
    """The products of experts with these weights, of activations of this dtype."""
    experts, outputs, _ = weight.codes.shape
    codes = weight.codes.view(torch.uint8)
    return grouped_weight(
        MXFP4Format(), (experts, outputs, weight.inputs), dtype, weight=codes, weight_scale=weight.scales
    )
