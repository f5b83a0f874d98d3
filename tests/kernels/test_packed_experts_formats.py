"""Experts with packed weights of every format: what packing keeps, and products beside those with the unpacked weights."""

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, near
from gluon_on_torch import on_torch
from torch import Tensor

from meshlm.kernels.grouped_gemm import reference
from meshlm.kernels.moe_align import kernel as moe_align
from meshlm.kernels.packed_experts import direct, kernel
from meshlm.kernels.packed_experts.layout import ExpertWeight, Format, concatenate, of_blocks, pack, unpack
from meshlm.kernels.packed_experts.plan import DirectShape, takes
from meshlm.kernels.packed_experts.runs import random_weight
from meshlm.kernels.packed_gemm import ggml
from meshlm.kernels.packed_gemm.reference import TABLES

pytestmark = MARKS
DIRECT = direct if DEVICE.type == "cuda" else on_torch(direct)
EXPERTS, TOPK = 3, 2
SHAPE = kernel.Shape(16, 32, 4, 2)
FORMATS = [
    Format(4, 128), Format(4, 64), Format(4, 32), Format(4, 256), Format(4, 32, "minima"), Format(4, 64, "nf4"),
    Format(5, 32, "minima"), Format(6, 16), Format(8, 32), Format(8, 128),
]  # fmt: skip
OF_DIRECT = [Format(4, 128), Format(4, 32, "minima"), Format(4, 64), Format(4, 256)]


def routed(rows: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, experts, weights; some rows go nowhere."""
    experts = torch.rand(rows, EXPERTS).argsort(dim=1)[:, :TOPK].to(torch.int32)
    experts[rows // 2, 0] = -1
    x = torch.randn(rows, inputs, device=DEVICE) / inputs**0.5
    return x.to(dtype), experts.to(DEVICE), torch.rand(rows, TOPK, device=DEVICE)


def weight_of(format: Format, outputs: int, inputs: int) -> ExpertWeight:
    return random_weight(EXPERTS, outputs, inputs, DEVICE, format=format)


@pytest.mark.parametrize("inputs", [32, 160, 384])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_packed_comes_back(format: Format, inputs: int) -> None:
    """Each code, scale and offset, of experts together and of each alone."""
    bits, group, values = format
    groups = -(-inputs // group)
    codes = torch.randint(0, 1 << bits, (2, 5, inputs), dtype=torch.uint8)
    scales = torch.randint(1, 9, (2, 5, groups)) / 8
    offsets = torch.randint(0, 1 << bits, (2, 5, groups)).float()
    weight = pack(codes, scales, offsets, format, torch.float32)
    assert weight.scales.dtype == torch.float16
    assert (weight.outputs, weight.groups, weight.inputs) == (5, groups, inputs)
    scale, offset = (each.repeat_interleave(group, -1)[..., :inputs] for each in (scales, offsets))
    expected = codes * scale + offset if values == "minima" else (codes - offset) * scale
    if values in TABLES:
        expected = torch.tensor(TABLES[values])[codes.long()] * scale
    assert torch.equal(unpack(weight, torch.float32), expected)
    assert torch.equal(unpack(weight.of_expert(1), torch.float32), expected[1])
    halves = [weight.of_tensors({name: tensor[n : n + 1] for name, tensor in weight.tensors().items()}) for n in (0, 1)]
    again = concatenate(halves)
    assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in weight.tensors().items())
    assert Format.of_name(format.name) == format._replace(group=min(group, 128))


def test_scales_keep_what_16_bits_do_not_hold() -> None:
    """Exactly where they can; else as float16 for activations of 16 bits, unless that does not reach as far."""
    codes, zeros = torch.zeros(1, 32, dtype=torch.uint8), torch.zeros(1, 1)

    def dtype_of(scale: float, dtype: torch.dtype) -> torch.dtype:
        return pack(codes, torch.full((1, 1), scale), zeros, Format(4, 32), dtype).scales.dtype

    third = 1 / 3
    assert [dtype_of(scale, torch.bfloat16) for scale in (0.125, 2.0**-40, third, third * 2.0**-20)] == [
        torch.float16, torch.bfloat16, torch.float16, torch.float32,
    ]  # fmt: skip
    assert dtype_of(third, torch.float32) == torch.float32


@pytest.mark.parametrize("ggml_type", sorted(ggml.LAYOUTS))
def test_blocks_of_gguf_files(ggml_type: int) -> None:
    """As kernels/packed_gemm decodes them."""
    layout = ggml.LAYOUTS[ggml_type]
    per_block = {144: 256, 176: 256, 210: 256}.get(layout.bytes, 32)
    data = torch.randint(0, 256, (6, 2 * layout.bytes), dtype=torch.uint8)
    halves = data.view(6, 2, layout.bytes)
    for at in {2: (0,), 3: (0, 2), 6: (0,), 7: (0, 2), 8: (0,), 12: (0, 2), 13: (0, 2), 14: (208,)}[ggml_type]:
        halves[..., at : at + 2] = torch.full((6, 2, 1), 0.5, dtype=torch.float16).view(torch.uint8)
    from meshlm.kernels.packed_gemm.reference import decode

    expected = decode(ggml.packed(data, ggml_type, torch.float32), torch.float32)
    weight = of_blocks(data.view(2, 3, -1), ggml_type, torch.float32)
    assert weight.inputs == 2 * per_block
    torch.testing.assert_close(unpack(weight, torch.float32).flatten(0, 1), expected, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_few_rows(format: Format, dtype: torch.dtype) -> None:
    inputs, outputs = (256, 40) if format.group == 256 else (160, 40)
    (x, experts, weights), weight = routed(5, inputs, dtype), weight_of(format, outputs, inputs)
    values = unpack(weight, torch.float32)
    inner = torch.zeros(5 * TOPK, outputs // 2, device=DEVICE, dtype=dtype)
    kernel.few(x, weight, experts, None, inner, SHAPE)
    near(inner, reference.by_entry(x, values, experts, gate=True), dtype, 2.0)
    entries = x.repeat_interleave(TOPK, 0)
    parts = torch.full((TOPK, 5, outputs), torch.nan, device=DEVICE)
    kernel.few(entries, weight, experts, weights, parts, SHAPE)
    expected = reference.by_entry(entries, values, experts).float().view(5, TOPK, outputs)
    near(parts, (expected * weights[:, :, None]).transpose(0, 1), dtype, 2.0)


@pytest.mark.parametrize("format", [Format(4, 128), Format(4, 32, "minima"), Format(6, 16), Format(8, 64)])
def test_tiles_of_many_rows(format: Format) -> None:
    """Where weights are scaled, not sums."""
    dtype, rows, inputs, outputs = torch.float16, 150, 160, 32
    (x, experts, _), weight = routed(rows, inputs, dtype), weight_of(format, outputs, inputs)
    shape = kernel.Shape(64, 32, 4, 2)
    ids, positions, ends, owners = moe_align.align(experts, EXPERTS, shape.block_m)
    inner = torch.zeros(len(ids), outputs // 2, device=DEVICE, dtype=dtype)
    kernel.sorted_rows(x, weight, inner, shape, kernel.Rows(ids, ends, owners, TOPK, experts.numel()), gate=True)
    real = (experts >= 0).flatten()
    expected = reference.by_entry(x, unpack(weight, torch.float32), experts, gate=True)
    near(inner[positions.flatten().long()[real]], expected[real], dtype, 2.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_in_an_order_of_their_own(dtype: torch.dtype) -> None:
    """As GPTQ's desc_act leaves them on a rank: some of the packed inputs are nobody's, and count for nothing."""
    columns, inputs, outputs = 100, 128, 32
    x, experts, weights = routed(3, columns, dtype)
    weight = weight_of(Format(4, 32), outputs, inputs)
    order = torch.stack([torch.randperm(inputs) for _ in range(EXPERTS)]) % columns
    weight = weight._replace(order=order.to(torch.int32).to(DEVICE), columns=columns)
    entries = x.repeat_interleave(TOPK, 0)
    parts = torch.full((TOPK, 3, outputs), torch.nan, device=DEVICE)
    kernel.few(entries, weight, experts, weights, parts, SHAPE)
    values = unpack(weight, torch.float32)
    assert values.shape == (EXPERTS, outputs, columns)
    expected = reference.by_entry(entries, values, experts).float().view(3, TOPK, outputs)
    near(parts, (expected * weights[:, :, None]).transpose(0, 1), dtype, 2.0)
    assert not takes(weight, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 64), (512, 40), (160, 36)])
@pytest.mark.parametrize("format", OF_DIRECT)
@pytest.mark.parametrize(
    ("rows", "shape"), [(1, DirectShape(2, 2)), (3, DirectShape(2, 1, 2)), (16, DirectShape(4, 4))]
)
def test_direct(rows: int, shape: DirectShape, format: Format, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    (x, experts, weights), weight = routed(rows, inputs, dtype), weight_of(format, outputs, inputs)
    assert takes(weight, dtype)
    values = unpack(weight, torch.float32)
    inner = torch.zeros(rows * TOPK, outputs // 2, device=DEVICE, dtype=dtype)
    DIRECT.few(x, weight, experts, None, inner, shape)
    near(inner, reference.by_entry(x, values, experts, gate=True), dtype)
    entries = x.repeat_interleave(TOPK, 0)
    parts = torch.full((TOPK, rows, outputs), torch.nan, device=DEVICE)
    DIRECT.few(entries, weight, experts, weights, parts, shape)
    expected = reference.by_entry(entries, values, experts).float().view(rows, TOPK, outputs)
    near(parts, (expected * weights[:, :, None]).transpose(0, 1), dtype)


@pytest.mark.parametrize("format", OF_DIRECT)
@pytest.mark.parametrize("block_m", [8, 16])
def test_direct_with_sorted_rows(block_m: int, format: Format) -> None:
    dtype, rows, inputs, outputs = torch.bfloat16, 21, 256, 64
    (x, experts, _), weight = routed(rows, inputs, dtype), weight_of(format, outputs, inputs)
    ids, positions, ends, owners = moe_align.align(experts, EXPERTS, block_m)
    inner = torch.zeros(len(ids), outputs // 2, device=DEVICE, dtype=dtype)
    order = kernel.Rows(ids, ends, owners, TOPK, experts.numel())
    DIRECT.sorted_rows(x, weight, inner, DirectShape(2, 2), block_m, order, gate=True)
    real = (experts >= 0).flatten()
    expected = reference.by_entry(x, unpack(weight, torch.float32), experts, gate=True)
    near(inner[positions.flatten().long()[real]], expected[real], dtype)


def test_what_direct_does_not_take() -> None:
    for format in (Format(8, 128), Format(6, 16), Format(4, 64, "nf4"), Format(5, 32, "minima")):
        assert not takes(weight_of(format, 16, 128), torch.bfloat16)
    weight = weight_of(Format(4, 128), 16, 128)
    assert not takes(weight, torch.float32)
    assert not takes(weight._replace(scales=weight.scales.float()), torch.bfloat16)
