"""Weights of experts of 8-bit floats, as kernels take them on any device."""

import torch
from torch import Tensor

from meshlm.protocol.model import QuantizationScheme
from meshlm.workers.formats.eight_bits import InputScale
from meshlm.workers.formats.format import GroupedWeight, grouped_weight
from meshlm.workers.formats.fp8 import Fp8Format


def fp8_experts(codes: Tensor, scales: Tensor, scheme: QuantizationScheme, dtype: torch.dtype) -> GroupedWeight:
    """codes [experts, outputs, inputs], scales [experts, outputs, groups]; dtype: that they compute in."""
    experts, outputs, inputs = codes.shape
    format = Fp8Format(scheme)
    format._inputs = [[InputScale(0, outputs, None, None)]] * experts
    return grouped_weight(format, (experts, outputs, inputs), dtype, weight=codes, weight_scale=scales)
