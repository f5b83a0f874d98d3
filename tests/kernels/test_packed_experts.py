"""Experts whose weights stay MXFP4: few and sorted rows against products with the decoded weights."""

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, near
from torch import Tensor

from meshlm.kernels.grouped_gemm import reference
from meshlm.kernels.moe_align import kernel as moe_align
from meshlm.kernels.moe_epilogue.kernel import PLAIN, Epilogue
from meshlm.kernels.mxfp4.reference import GROUP, decode_mxfp4
from meshlm.kernels.packed_experts import kernel
from meshlm.kernels.packed_experts.layout import ExpertWeight, pack_mxfp4, unpack

pytestmark = MARKS
EXPERTS, TOPK, HIDDEN, WIDE = 5, 2, 160, 96  # rows of two chunks and of one, whose last planes are missing
SHAPE = kernel.Shape(16, 32, 4, 2)


def some_weights(experts: int, outputs: int, inputs: int) -> tuple[ExpertWeight, Tensor]:
    """Packed, and its values in float32."""
    blocks = torch.randint(0, 256, (experts, outputs, inputs // GROUP, GROUP // 2), dtype=torch.uint8)
    scales = torch.randint(121, 126, (experts, outputs, inputs // GROUP), dtype=torch.uint8)
    codes, powers = pack_mxfp4(blocks.to(DEVICE), scales.to(DEVICE))
    return ExpertWeight(codes, powers, inputs), decode_mxfp4(blocks, scales, torch.float32).to(DEVICE)


def epilogues(dtype: torch.dtype) -> tuple[Epilogue, Epilogue]:
    above, below = (torch.randn(EXPERTS, outputs, device=DEVICE).to(dtype) for outputs in (2 * WIDE, HIDDEN))
    return Epilogue(above, 1.702, 1.5), Epilogue(below)


def case(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, experts, weights; some rows go nowhere."""
    experts = torch.rand(rows, EXPERTS).argsort(dim=1)[:, :TOPK].to(torch.int32)
    experts[experts == 1] = -1
    experts[rows // 2] = -1 if rows > 1 else experts[rows // 2]
    x = torch.randn(rows, HIDDEN, device=DEVICE) / HIDDEN**0.5
    return x.to(dtype), experts.to(DEVICE), torch.rand(rows, TOPK, device=DEVICE)


@pytest.mark.parametrize("inputs", [32, 96, 128, 160, 384])
def test_layout(inputs: int) -> None:
    """Every code and every scale comes back as the value that kernels/mxfp4 gives it."""
    blocks = torch.randint(0, 256, (3, 7, inputs // GROUP, GROUP // 2), dtype=torch.uint8)
    scales = torch.randint(0, 255, (3, 7, inputs // GROUP), dtype=torch.uint8)
    codes, powers = pack_mxfp4(blocks, scales)
    assert (codes.dtype, codes.shape) == (torch.int16, (3, 7, -(-inputs // 128) * 32))
    assert (powers.dtype, powers.shape) == (torch.uint8, (3, 7, -(-inputs // 128) * 4))
    for dtype in (torch.float32, torch.bfloat16):
        found = unpack(ExpertWeight(codes, powers, inputs), dtype)
        assert torch.equal(found, decode_mxfp4(blocks, scales, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 19])
def test_few_rows(rows: int, dtype: torch.dtype) -> None:
    (above, below), (x, experts, weights) = epilogues(dtype), case(rows, dtype)
    (gate_up, values), (down, values_down) = (
        some_weights(EXPERTS, 2 * WIDE, HIDDEN),
        some_weights(EXPERTS, HIDDEN, WIDE),
    )
    inner = torch.zeros(rows * TOPK, WIDE, device=DEVICE, dtype=dtype)
    kernel.few(x, gate_up, experts, None, inner, SHAPE, above)
    expected = reference.by_entry(x, values, experts, gate=True, epilogue=above)
    near(inner, expected, dtype, 4.0)
    parts = torch.full((TOPK, rows, HIDDEN), torch.nan, device=DEVICE)
    kernel.few(inner, down, experts, weights, parts, SHAPE, below)
    found = reference.by_entry(inner, values_down, experts, epilogue=below).float().view(rows, TOPK, HIDDEN)
    near(parts, (found * weights[:, :, None]).transpose(0, 1), dtype, 6.0)


def test_stages_that_have_no_room_are_left_out() -> None:
    weight, _ = some_weights(1, 16, 64)
    found = [
        kernel._options(kernel.Shape(rows, 64, 8, 3), torch.zeros(1, dtype=dtype), weight, PLAIN, rows)["STAGES"]
        for rows in (16, 128, 256)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert found == [3, 3, 3, 3, 3, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "shape"), [(45, SHAPE), (300, kernel.Shape(256, 64, 8, 2)), (300, kernel.Shape(256, 64, 8, 3))]
)
def test_sorted_rows(rows: int, shape: kernel.Shape, dtype: torch.dtype) -> None:
    (above, below), (x, experts, weights) = epilogues(dtype), case(rows, dtype)
    (gate_up, values), (down, values_down) = (
        some_weights(EXPERTS, 2 * WIDE, HIDDEN),
        some_weights(EXPERTS, HIDDEN, WIDE),
    )
    ids, positions, ends, owners = moe_align.align(experts, EXPERTS, shape.block_m)
    order = kernel.Rows(ids, ends, owners, TOPK, experts.numel())
    inner = torch.zeros(len(ids), WIDE, device=DEVICE, dtype=dtype)
    kernel.sorted_rows(x, gate_up, inner, shape, order, gate=True, epilogue=above)
    real = (experts >= 0).flatten()
    place = positions.flatten().long()[real]
    near(inner[place], reference.by_entry(x, values, experts, gate=True, epilogue=above)[real], dtype, 4.0)
    entries = torch.zeros(rows * TOPK, WIDE, device=DEVICE, dtype=dtype)
    entries[real] = inner[place]
    expected = reference.by_entry(entries, values_down, experts, epilogue=below)
    out = torch.full((len(ids), HIDDEN), torch.nan, device=DEVICE, dtype=dtype)
    kernel.sorted_rows(inner, down, out, shape, order, epilogue=below)
    near(out[place], expected[real], dtype, 6.0)
    parts = torch.full((TOPK, rows, HIDDEN), torch.nan, device=DEVICE)
    kernel.sorted_rows(inner, down, parts, shape, order, parts=kernel.Parts(experts, weights), epilogue=below)
    weighted = expected.float().view(rows, TOPK, HIDDEN) * (weights * (experts >= 0))[:, :, None]
    near(parts, weighted.transpose(0, 1), dtype, 6.0)
