"""Weights and activations of 8-bit integers (compressed-tensors' int-quantized), multiplied as they are on a GPU (eight_bits.py).

A scale of a whole tensor is a scale of each of its rows.
"""

import torch
from torch import Tensor

from meshlm.kernels.quantise_int8.reference import Int8Weight, quantise
from meshlm.protocol.model import QuantizationScheme
from meshlm.workers.formats.eight_bits import EightBits, InputScale
from meshlm.workers.formats.format import Encode, KernelWeight, WeightedLayer, has_kernels


class Int8Format(EightBits[Int8Weight]):
    code_type = torch.int8

    def __init__(self, scheme: QuantizationScheme) -> None:
        super().__init__(scheme)
        self.encode: Encode | None = encode if scheme.online else None

    def num_groups(self, inputs: int) -> int:
        return 1

    def decoded(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return (codes.float() * scales).to(dtype)

    def rounded(self, x: Tensor, given: InputScale) -> Tensor:
        codes, scales, zeros = quantise(x, not self.scheme.zeros, given.scale, given.zero)
        return ((codes.float() - zeros) * scales).to(x.dtype)

    def native_weight(self, matrix: dict[str, Tensor], given: InputScale, dtype: torch.dtype) -> Int8Weight | None:
        if not has_kernels(matrix["weight"].device, dtype):
            return None
        from meshlm.workers.formats import self_test

        weight = self._weight(matrix, given)
        return weight if self_test.is_int8_right(weight, dtype) else None

    def _weight(self, matrix: dict[str, Tensor], given: InputScale) -> Int8Weight:
        codes = matrix["weight"][given.rows]
        sums = codes.sum(dim=-1, dtype=torch.int32).float()
        scales = matrix["weight_scale"][given.rows].contiguous()
        return Int8Weight(codes, scales, sums, not self.scheme.zeros, given.scale, given.zero)

    def native_product(self, x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
        from meshlm.workers.formats import triton_products

        return triton_products.int8_linear(x, weight, bias)

    def expert_kernel(self, layer: WeightedLayer) -> KernelWeight:
        """As `Fp8Format.expert_kernel`. Activations have no zero points, so the sums of codes are not needed."""
        scales = layer.get_parameter("weight_scale").data
        return Int8Weight(layer.weight.data, scales, scales[:0], True, self._largest)


def encode(values: Tensor) -> dict[str, Tensor]:
    """Each row to the nearest of 255 integers."""
    codes, scales, _ = quantise(values, True)
    return {"weight": codes, "weight_scale": scales}
