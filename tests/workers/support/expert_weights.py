"""Weights of experts of 8 bits, as kernels take them on any device."""

import torch
from torch import Tensor

from meshlm.protocol.model import QuantizationScheme
from meshlm.workers.formats.eight_bits import Fp8Format, InputScale, Int8Format
from meshlm.workers.formats.format import GroupedWeight, grouped_weight


def fp8_experts(codes: Tensor, scales: Tensor, scheme: QuantizationScheme, dtype: torch.dtype) -> GroupedWeight:
    """codes [experts, outputs, inputs], scales [experts, outputs, groups]; dtype: that they compute in."""
    return _grouped(Fp8Format(scheme), codes, scales, dtype)


def int8_experts(codes: Tensor, scales: Tensor, scheme: QuantizationScheme, dtype: torch.dtype) -> GroupedWeight:
    """As `fp8_experts`, of integers."""
    return _grouped(Int8Format(scheme), codes, scales, dtype)


def _grouped(format: Fp8Format | Int8Format, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> GroupedWeight:
    experts, outputs, inputs = codes.shape
    format._inputs = [[InputScale(0, outputs, None, None)]] * experts
    return grouped_weight(format, (experts, outputs, inputs), dtype, weight=codes, weight_scale=scales)
