"""Experts of a checkpoint that has them as MXFP4: kept so on a GPU, where kernels/packed_experts decodes what it multiplies."""

import torch
from torch import Tensor

from meshlm.kernels.packed_experts.layout import MXFP4, chunks_of, encode_mxfp4, unpack
from meshlm.workers.formats.expert_codes import ExpertCodes
from meshlm.workers.formats.format import Encode, ProductOps, WeightedLayer


class MXFP4Format(ExpertCodes):
    """Codes and scales as kernels read them; floats become so while they are loaded."""

    encode: Encode | None = staticmethod(encode_mxfp4)

    def add_parameters(self, layer: WeightedLayer) -> None:
        chunks = chunks_of(layer.inputs)
        layer.add("weight", layer.outputs, chunks * 64, dtype=torch.uint8)
        layer.add("weight_scale", layer.outputs, chunks * 4, dtype=torch.uint8)
        self._kept = layer.inputs, MXFP4, 0

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        """The loader has packed it."""

    def values(self, layer: WeightedLayer) -> Tensor:
        weight = self.expert_weight(layer)
        assert weight is not None
        return unpack(weight, layer.dtype)
