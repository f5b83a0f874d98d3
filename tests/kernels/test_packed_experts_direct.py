"""A few rows of each expert with its MXFP4 weights, by tensor cores; without a GPU what the kernel computes (gluon_on_torch.py)."""

import pytest
import torch
from device import DEVICE, MARKS, near
from gluon_on_torch import on_torch
from torch import Tensor

from meshlm.kernels.grouped_gemm import reference
from meshlm.kernels.moe_align import kernel as moe_align
from meshlm.kernels.moe_epilogue.kernel import GELU_ALPHA, PLAIN, Epilogue
from meshlm.kernels.mxfp4.reference import GROUP, decode_mxfp4
from meshlm.kernels.packed_experts import direct
from meshlm.kernels.packed_experts.kernel import Parts, Rows
from meshlm.kernels.packed_experts.layout import ExpertWeight, pack_mxfp4
from meshlm.kernels.packed_experts.plan import DirectShape as Shape
from meshlm.kernels.packed_experts.plan import takes

pytestmark = MARKS
KERNELS = direct if DEVICE.type == "cuda" else on_torch(direct)
DTYPE = torch.bfloat16
EXPERTS, TOPK = 5, 2
SIZES = [
    (160, 96),
    (300, 48),
]  # hidden and wide: two chunks and one, whose last planes are missing; three and one, whose last are cut


def some_weights(experts: int, outputs: int, inputs: int) -> tuple[ExpertWeight, Tensor]:
    """Packed, and its values in float32."""
    groups = -(-inputs // GROUP)
    blocks = torch.randint(0, 256, (experts, outputs, groups, GROUP // 2), dtype=torch.uint8)
    if inputs % GROUP:
        blocks[..., -1, inputs % GROUP // 2 :] = 0
    scales = torch.randint(121, 126, (experts, outputs, groups), dtype=torch.uint8)
    codes, powers = pack_mxfp4(blocks.to(DEVICE), scales.to(DEVICE))
    values = decode_mxfp4(blocks, scales, torch.float32)[..., :inputs]
    return ExpertWeight(codes, powers, inputs), values.to(DEVICE)


def case(rows: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, experts, weights; some rows go nowhere."""
    experts = torch.rand(rows, EXPERTS).argsort(dim=1)[:, :TOPK].to(torch.int32)
    experts[experts == 1] = -1
    experts[rows // 2] = -1 if rows > 1 else experts[rows // 2]
    x = torch.randn(rows, hidden, device=DEVICE) / hidden**0.5
    return x.to(DTYPE), experts.to(DEVICE), torch.rand(rows, TOPK, device=DEVICE)


def epilogues(hidden: int, wide: int) -> tuple[Epilogue, Epilogue]:
    above, below = (torch.randn(EXPERTS, outputs, device=DEVICE).to(DTYPE) for outputs in (2 * wide, hidden))
    return Epilogue(above, 1.702, 1.5), Epilogue(below)


@pytest.mark.parametrize(("hidden", "wide"), SIZES)
@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (1, Shape(2, 2)),
        (2, Shape(2, 1, 2)),
        (3, Shape(1, 1, 3)),
        (9, Shape(4, 4)),
        (16, Shape(2, 2)),
        (16, Shape(2, 1, 2)),
    ],
)
def test_few_rows(rows: int, shape: Shape, hidden: int, wide: int) -> None:
    (above, below), (x, experts, weights) = epilogues(hidden, wide), case(rows, hidden)
    (gate_up, values), (down, values_down) = (
        some_weights(EXPERTS, 2 * wide, hidden),
        some_weights(EXPERTS, hidden, wide),
    )
    inner = torch.zeros(rows * TOPK, wide, device=DEVICE, dtype=DTYPE)
    KERNELS.few(x, gate_up, experts, None, inner, shape, above)
    near(inner, reference.by_entry(x, values, experts, gate=True, epilogue=above), DTYPE)
    parts = torch.full((TOPK, rows, hidden), torch.nan, device=DEVICE)
    KERNELS.few(inner, down, experts, weights, parts, shape._replace(tiles=max(1, shape.tiles // 2)), below)
    found = reference.by_entry(inner, values_down, experts, epilogue=below).float().view(rows, TOPK, hidden)
    near(parts, (found * weights[:, :, None]).transpose(0, 1), DTYPE, 2.0)


@pytest.mark.parametrize(("hidden", "wide"), SIZES)
@pytest.mark.parametrize("block_m", [16, 32])
def test_sorted_rows(block_m: int, hidden: int, wide: int) -> None:
    rows, shape = 45, Shape(2, 2)
    (above, below), (x, experts, weights) = epilogues(hidden, wide), case(rows, hidden)
    (gate_up, values), (down, values_down) = (
        some_weights(EXPERTS, 2 * wide, hidden),
        some_weights(EXPERTS, hidden, wide),
    )
    ids, positions, ends, owners = moe_align.align(experts, EXPERTS, block_m)
    order = Rows(ids, ends, owners, TOPK, experts.numel())
    inner = torch.zeros(len(ids), wide, device=DEVICE, dtype=DTYPE)
    KERNELS.sorted_rows(x, gate_up, inner, shape, block_m, order, gate=True, epilogue=above)
    real = (experts >= 0).flatten()
    place = positions.flatten().long()[real]
    near(inner[place], reference.by_entry(x, values, experts, gate=True, epilogue=above)[real], DTYPE)
    entries = torch.zeros(rows * TOPK, wide, device=DEVICE, dtype=DTYPE)
    entries[real] = inner[place]
    expected = reference.by_entry(entries, values_down, experts, epilogue=below)
    out = torch.full((len(ids), hidden), torch.nan, device=DEVICE, dtype=DTYPE)
    KERNELS.sorted_rows(inner, down, out, shape, block_m, order, epilogue=below)
    near(out[place], expected[real], DTYPE, 2.0)
    parts = torch.full((TOPK, rows, hidden), torch.nan, device=DEVICE)
    KERNELS.sorted_rows(inner, down, parts, shape, block_m, order, parts=Parts(experts, weights), epilogue=below)
    weighted = expected.float().view(rows, TOPK, hidden) * (weights * (experts >= 0))[:, :, None]
    near(parts, weighted.transpose(0, 1), DTYPE, 2.0)


@pytest.mark.parametrize("epilogue", [PLAIN, Epilogue(alpha=GELU_ALPHA)])
def test_other_activations(epilogue: Epilogue) -> None:
    x, experts, _ = case(3, 160)
    gate_up, values = some_weights(EXPERTS, 192, 160)
    inner = torch.zeros(3 * TOPK, 96, device=DEVICE, dtype=DTYPE)
    KERNELS.few(x, gate_up, experts, None, inner, Shape(2, 2), epilogue)
    near(inner, reference.by_entry(x, values, experts, gate=True, epilogue=epilogue), DTYPE)


@pytest.mark.parametrize("exponent", [5, 60, 100, 126])
def test_any_scale(exponent: int) -> None:
    """Of as many sizes as models could have; inputs make up for it, so that results are of about 1."""
    x, experts, weights = case(2, 160)
    down, values = some_weights(EXPERTS, 32, 160)
    shift = exponent - 123
    weight, size = down._replace(scales=down.scales + shift), 2.0**-shift
    entries = x.repeat_interleave(TOPK, 0).float() * size
    parts = torch.zeros(TOPK, 2, 32, device=DEVICE)
    KERNELS.few(entries.to(DTYPE), weight, experts, weights, parts, Shape(2, 2))
    found = reference.by_entry((entries / size).to(DTYPE), values, experts).float().view(2, TOPK, 32)
    near(parts, (found * weights[:, :, None]).transpose(0, 1), DTYPE, 2.0)


def test_scales_that_it_cannot_have() -> None:
    weight, _ = some_weights(2, 16, 64)
    assert takes(weight, DTYPE)
    weight.scales[0, 3, 1] = 128
    assert takes(weight, DTYPE)
    weight.scales[0, 3, 1] = 129
    assert not takes(weight, DTYPE)
