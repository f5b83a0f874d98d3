"""Products of 8-bit floats against plain torch: few rows and many, a scale for a row or for each group, in parts."""

import pytest
import torch
from device import DEVICE, MARKS, WIDE, near, near_in_fp8, needs_fp8
from torch import Tensor

from meshlm.kernels.fp8_gemm import reference
from meshlm.kernels.fp8_gemm.kernel import Shape, fp8_gemm, parts
from meshlm.kernels.fp8_gemm.reference import quantised_rows
from meshlm.kernels.quantise_fp8.kernel import quantise

pytestmark = [*MARKS, needs_fp8]


def weight_of(outputs: int, inputs: int, group: int) -> tuple[Tensor, Tensor]:
    codes = (torch.randn(outputs, inputs, device=DEVICE) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    groups = -(-inputs // group) if group else 1
    return codes, (torch.rand(outputs, groups, device=DEVICE) + 0.5) / 1000


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("rounds", [True, False])
@pytest.mark.parametrize(
    ("rows", "inputs", "shape"),
    [
        (1, 256, Shape(16, 64, 64, 2, 4, 2, swap=True)),
        (17, 192, Shape(32, 32, 64, 1, 4, 2)),
        (70, 192, Shape(64, 32, 64, 1, 4, 2)),
    ],
)
def test_products(rows: int, inputs: int, shape: Shape, rounds: bool, group: int) -> None:
    w, w_scales = weight_of(48, inputs, group)
    x = torch.randn(rows, inputs, device=DEVICE, dtype=WIDE) / 4
    codes, x_scales = quantise(x, group) if rounds else (x, None)
    expected = reference.fp8_gemm(codes, x_scales, w, w_scales, None, torch.float32)
    found = parts(codes, x_scales, w, w_scales, shape, WIDE)
    near(found.sum(0) if shape.splits > 1 else found, expected, WIDE, 4.0)


def test_inputs_that_end_within_a_tile() -> None:
    w, w_scales = weight_of(64, 208, 0)
    codes, x_scales = quantise(torch.randn(5, 208, device=DEVICE, dtype=WIDE) / 8, 0)
    expected = reference.fp8_gemm(codes, x_scales, w, w_scales, None, torch.float32)
    near(parts(codes, x_scales, w, w_scales, Shape(16, 32, 64, 1, 4, 2, swap=True), WIDE), expected, WIDE, 4.0)


@pytest.mark.parametrize("rows", [3, 80])
def test_whole_products_with_a_bias(rows: int) -> None:
    w, w_scales = weight_of(64, 1024, 0)
    bias = torch.randn(64, device=DEVICE, dtype=WIDE)
    codes, x_scales = quantise(torch.randn(rows, 1024, device=DEVICE, dtype=WIDE) / 8, 0)
    expected = reference.fp8_gemm(codes, x_scales, w, w_scales, bias, torch.float32)
    near(fp8_gemm(codes, x_scales, w, w_scales, bias, WIDE), expected, WIDE, 4.0)


def test_a_scale_that_is_known_beforehand() -> None:
    torch.manual_seed(0)
    x, scale = torch.randn(5, 96, device=DEVICE, dtype=WIDE), torch.tensor(0.004, device=DEVICE)
    codes, scales = quantise(x, 0, scale)
    assert torch.equal(scales, scale.expand(5, 1))
    near_in_fp8(codes, (x.float() / scale).clamp(-448, 448))
    assert float(codes.float().abs().max()) == 448.0


def test_rows_of_floats() -> None:
    weight = torch.randn(20, 64, device=DEVICE)
    weight[3] = 0
    codes, scales = quantised_rows(weight)
    error = (codes.float() * scales - weight).abs().amax(1) / weight.abs().amax(1).clamp(min=1e-6)
    assert float(error.max()) < 1 / 27
    assert torch.equal(codes[3].float(), torch.zeros(64, device=DEVICE))
