"""Rounding to 8-bit integers, and products of those, against plain torch."""

import pytest
import torch
from device import DEVICE, MARKS, WIDE, near

from meshlm.kernels.fp8_gemm.kernel import int8_gemm
from meshlm.kernels.quantise_int8 import kernel, reference
from meshlm.kernels.quantise_int8.reference import Int8Weight, int8_linear

pytestmark = MARKS
SCALE, ZERO = torch.tensor(0.02, device=DEVICE), torch.tensor(-7.0, device=DEVICE)
ROUNDINGS = {
    "symmetric": (True, None, None),
    "zeros": (False, None, None),
    "static": (True, SCALE, None),
    "static-zeros": (False, SCALE, ZERO),
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_rounding(name: str) -> None:
    x = torch.randn(5, 100, device=DEVICE, dtype=WIDE) + 0.3
    x[2] = 0
    codes, scales, zeros = kernel.quantise(x, *ROUNDINGS[name])
    expected = reference.quantise(x, *ROUNDINGS[name])
    torch.testing.assert_close(scales, expected[1])
    assert torch.equal(zeros, expected[2])
    assert int((codes.int() - expected[0].int()).abs().max()) <= 1
    assert float((codes != expected[0]).float().mean()) < 0.02


@pytest.mark.parametrize("rows", [1, 20, 80])
@pytest.mark.parametrize("name", ROUNDINGS)
def test_products(name: str, rows: int) -> None:
    inputs, outputs = 1024, 64
    x = torch.randn(rows, inputs, device=DEVICE, dtype=WIDE) / 8 + 0.05
    codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8, device=DEVICE)
    scales = torch.rand(outputs, 1, device=DEVICE) / 5000
    bias = torch.randn(outputs, device=DEVICE, dtype=WIDE)
    sums = codes.sum(dim=1, dtype=torch.int32).float()
    symmetric, scale, zero = ROUNDINGS[name]
    rounded, x_scales, x_zeros = kernel.quantise(x, symmetric, scale, zero)
    found = int8_gemm(rounded, x_scales, None if symmetric else x_zeros, codes, scales, sums, bias, WIDE)
    near(found, int8_linear(x, Int8Weight(codes, scales, sums, symmetric, scale, zero), bias), WIDE, 4.0)
