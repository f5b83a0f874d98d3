"""A packed weight as the arguments of kernels."""

import torch
from torch import Tensor

from meshlm.kernels.packed_gemm.reference import PLANE, PackedWeight


def tensors(weight: PackedWeight) -> tuple[Tensor, ...]:
    """The words of the low bits and of the others, scales, zeros, minima, table. What is not there is stood for by what is."""
    low = weight.low
    return (
        low,
        low if weight.high is None else weight.high,
        weight.scales,
        low if weight.zeros is None else weight.zeros,
        low if weight.minima is None else weight.minima,
        low if weight.table is None else weight.table,
    )


def outputs_for(x: Tensor, weight: PackedWeight, splits: int) -> Tensor:
    """Room for a product with x [m, inputs]: [m, outputs] of its dtype, or float32 [splits, m, outputs]."""
    sizes = (x.shape[0], weight.outputs)
    if splits == 1:
        return torch.empty(sizes, dtype=x.dtype, device=x.device)
    return torch.empty(splits, *sizes, dtype=torch.float32, device=x.device)


def constants(weight: PackedWeight) -> dict[str, object]:
    return {
        "INPUTS": weight.inputs, "OUTPUTS": weight.outputs, "CHUNKS": weight.low.shape[1] // PLANE, "BITS": weight.bits,
        "GROUP": weight.group, "ZERO": float(weight.zero), "ZEROS": weight.zeros is not None, "MINIMA": weight.minima is not None,
        "TABLE": weight.table is not None,
    }  # fmt: skip
