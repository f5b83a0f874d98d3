"""Experts' products with biases, other activations and without a gate, in the kernels of few and sorted rows, against
plain torch."""

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, near
from torch import Tensor

from meshlm.kernels.grouped_gemm import kernel as grouped_gemm
from meshlm.kernels.grouped_gemm import reference
from meshlm.kernels.moe_align import kernel as moe_align
from meshlm.kernels.moe_epilogue.kernel import GELU_ALPHA, Epilogue
from meshlm.kernels.moe_few import kernel as moe_few

pytestmark = MARKS
EXPERTS, TOPK, HIDDEN, WIDE = 6, 3, 72, 40
ALPHA, LIMIT = 1.702, 0.8  # so that both ends are met
ACTIVATIONS = [(0.0, LIMIT), (ALPHA, LIMIT), (GELU_ALPHA, 0.0)]


def made(*shape: int, dtype: torch.dtype) -> Tensor:
    found: Tensor = torch.randn(*shape, device=DEVICE).to(dtype)
    return found


def choices(rows: int) -> Tensor:
    found = torch.rand(rows, EXPERTS).argsort(dim=1)[:, :TOPK].to(torch.int32)
    found[found == 2] = -1
    found[rows // 2] = -1
    return found.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("alpha", "limit"), ACTIVATIONS)
def test_few_rows(alpha: float, limit: float, dtype: torch.dtype) -> None:
    rows, shape = 19, moe_few.Shape(32, 32, 4, 2)
    x, chosen, weights = made(rows, HIDDEN, dtype=dtype), choices(rows), torch.rand(rows, TOPK, device=DEVICE)
    gate_up, down = (
        made(EXPERTS, *sizes, dtype=dtype) / sizes[1] ** 0.5 for sizes in ((2 * WIDE, HIDDEN), (HIDDEN, WIDE))
    )
    above = Epilogue(made(EXPERTS, 2 * WIDE, dtype=dtype), alpha, limit)
    below = Epilogue(made(EXPERTS, HIDDEN, dtype=dtype))
    inner = torch.zeros(rows * TOPK, WIDE, device=DEVICE, dtype=dtype)
    moe_few.few(x, gate_up, chosen, None, inner, shape, epilogue=above)
    expected = reference.by_entry(x, gate_up, chosen, gate=True, epilogue=above)
    near(inner, expected, dtype, 4.0)
    parts = torch.full((TOPK, rows, HIDDEN), torch.nan, device=DEVICE)
    moe_few.few(inner, down, chosen, weights, parts, shape, epilogue=below)
    found = reference.by_entry(expected, down, chosen, epilogue=below).float().view(rows, TOPK, HIDDEN)
    near(parts, (found * weights[:, :, None]).transpose(0, 1), dtype, 6.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("alpha", "limit"), ACTIVATIONS)
def test_sorted_rows(alpha: float, limit: float, dtype: torch.dtype) -> None:
    rows, shape = 50, grouped_gemm.Shape(16, 32, 64, 4, 2, tiles=2)
    x, chosen, weights = made(rows, HIDDEN, dtype=dtype), choices(rows), torch.rand(rows, TOPK, device=DEVICE)
    gate_up, down = (
        made(EXPERTS, *sizes, dtype=dtype) / sizes[1] ** 0.5 for sizes in ((2 * WIDE, HIDDEN), (HIDDEN, WIDE))
    )
    above = Epilogue(made(EXPERTS, 2 * WIDE, dtype=dtype), alpha, limit)
    below = Epilogue(made(EXPERTS, HIDDEN, dtype=dtype))
    ids, positions, ends, _ = moe_align.align(chosen, EXPERTS, shape.block_m)
    inner = torch.zeros(len(ids), WIDE, device=DEVICE, dtype=dtype)
    count = chosen.numel()
    grouped_gemm.sorted_gemm(x, gate_up, inner, shape, ends, ids, TOPK, count, gate=True, epilogue=above)
    expected = reference.by_entry(x, gate_up, chosen, gate=True, epilogue=above)
    real = (chosen >= 0).flatten()
    near(inner[positions.flatten().long()[real]], expected[real], dtype, 4.0)
    parts = torch.full((TOPK, rows, HIDDEN), torch.nan, device=DEVICE)
    to = grouped_gemm.Parts(chosen, weights)
    grouped_gemm.sorted_gemm(inner, down, parts, shape, ends, ids, TOPK, count, parts=to, epilogue=below)
    found = reference.by_entry(expected, down, chosen, epilogue=below).float().view(rows, TOPK, HIDDEN)
    near(parts, (found * (weights * (chosen >= 0))[:, :, None]).transpose(0, 1), dtype, 6.0)


NO_GATE = Epilogue(gated=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_gate(dtype: torch.dtype) -> None:
    """Few and sorted rows; what is not a number stays so."""
    rows = 19
    x, chosen = made(rows, HIDDEN, dtype=dtype), choices(rows)
    x[2] = torch.nan
    up = made(EXPERTS, WIDE, HIDDEN, dtype=dtype) / HIDDEN**0.5
    expected = reference.by_entry(x, up, chosen, gate=True, epilogue=NO_GATE)
    real, number = (chosen >= 0).flatten(), expected.isfinite().all(dim=1)
    inner = torch.zeros(rows * TOPK, WIDE, device=DEVICE, dtype=dtype)
    moe_few.few(x, up, chosen, None, inner, moe_few.Shape(32, 32, 4, 2), epilogue=NO_GATE)
    near(inner[number], expected[number], dtype, 4.0)
    assert inner[~number & real].isnan().all()
    tiles = grouped_gemm.Shape(16, 32, 64, 4, 2, tiles=2)
    ids, positions, ends, _ = moe_align.align(chosen, EXPERTS, tiles.block_m)
    inner = torch.zeros(len(ids), WIDE, device=DEVICE, dtype=dtype)
    grouped_gemm.sorted_gemm(x, up, inner, tiles, ends, ids, TOPK, chosen.numel(), gate=True, epilogue=NO_GATE)
    place = positions.flatten().long()[real & number]
    near(inner[place], expected[real & number], dtype, 4.0)
