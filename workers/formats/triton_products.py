"""Products with weights of 8 bits by Triton's kernels. Called by formats on a GPU that has shown that they are right (self_test.py)."""

import torch
from torch import Tensor

from meshlm.kernels.fp8_gemm import kernel as fp8
from meshlm.kernels.fp8_gemm.reference import Fp8Weight
from meshlm.kernels.gemv.kernel import gemv
from meshlm.kernels.quantise_fp8.kernel import quantise
from meshlm.kernels.quantise_int8 import kernel as quantise_int8
from meshlm.kernels.quantise_int8.reference import Int8Weight
from meshlm.workers.formats import self_test
from meshlm.workers.formats.format import Norm
from meshlm.workers.partial_sum import PartialSum


def tested_fp8(weight: Fp8Weight, dtype: torch.dtype) -> Fp8Weight | None:
    """The weight, and which kernels compute with it; None: none does on this GPU."""
    capable = fp8.takes(weight.group) and torch.cuda.get_device_capability() >= (8, 9)
    return self_test.tested_fp8(weight, dtype) if capable else None


def fp8_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """[m, inputs] -> [m, outputs], in 8 bits."""
    if x.shape[0] == 1 and weight.one_row:
        return gemv(x.contiguous(), weight, bias)[0]
    codes, scales, group, rounded, input_scale, _ = weight
    values, x_scales = (x, None) if rounded is None else quantise(x.contiguous(), rounded, input_scale)
    return fp8.fp8_gemm(values, x_scales, codes, scales, bias, x.dtype, group)


def norm_fp8_row(x: PartialSum, weight: Fp8Weight, bias: Tensor | None, norm: Norm, gate: str) -> tuple[Tensor, Tensor]:
    """The product of one row's norm, and the new residual; see `Ops.norm_linear`."""
    return gemv(x.value, weight, bias, norm=norm[0], residual=x.residual, eps=norm[1], own=x.own_norm, gate=gate)


def int8_linear(x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
    """[m, inputs] -> [m, outputs], in 8-bit integers."""
    codes, scales, zeros = quantise_int8.quantise(
        x.contiguous(), weight.symmetric, weight.input_scale, weight.input_zero
    )
    given = None if weight.symmetric else zeros
    return fp8.int8_gemm(codes, scales, given, weight.codes, weight.scales, weight.sums, bias, x.dtype)
