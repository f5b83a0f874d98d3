"""Products with packed weights (reference.py):  out = x W^T, of few rows bound by the reading of the weight alone.

A program takes BLOCK_N outputs and a share of the chunks. A plane of a chunk (32 inputs) is one product of 32 columns of x with the
codes. These become numbers by the bits that they are: or-ed into the mantissa of 2^7 (bfloat16) or 2^10 (float16) they are that
much too large, exactly. Where a scale counts for a whole plane, the product with the integers is scaled, not each weight (AFTER).

Of many rows the weight is decoded, and cuBLAS multiplies: what decoding costs is little beside the product then.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl, tables
from meshlm.kernels.gemm.kernel import gemm
from meshlm.kernels.moe_sum.kernel import sum_parts
from meshlm.kernels.packed_few import plan
from meshlm.kernels.packed_gemm import gemv, pairs
from meshlm.kernels.packed_gemm.arguments import constants, outputs_for, tensors
from meshlm.kernels.packed_gemm.reference import CHUNK, PLANE, PackedWeight


@triton.jit
def _codes(low, high, J: tl.constexpr, BITS: tl.constexpr):
    """The codes of plane J, int32 [BLOCK_N, 32]."""
    codes = (low >> (4 * J)) & 15
    if BITS == 5:
        codes |= ((high.to(tl.int32) >> J) & 1) << 4
    elif BITS == 6:
        codes |= ((high.to(tl.int32) >> (2 * J)) & 3) << 4
    elif BITS == 8:
        codes |= ((high >> (4 * J)) & 15) << 4
    return codes


@triton.jit
def _integers(codes, zero, dtype: tl.constexpr, BITS: tl.constexpr):
    """codes - zero, exactly, in the dtype of x."""
    if dtype == tl.float16:
        return (codes | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - (1024.0 + zero).to(tl.float16)
    elif dtype == tl.bfloat16 and BITS < 8:
        return (codes | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - (128.0 + zero).to(tl.bfloat16)
    else:
        return (codes.to(tl.float32) - zero).to(dtype)


_PLANES: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 mask, base, s0, s1, t0, t1;
    mov.b32 mask, 0x000F000F;
    mov.b32 base, 0x43004300;
    lop3.b32 t0, $8, mask, base, 0xEA;
    lop3.b32 t1, $9, mask, base, 0xEA;
    prmt.b32 $0, t0, t1, 0x5410;
    prmt.b32 $4, t0, t1, 0x7632;
    shr.u32 s0, $8, 4;
    shr.u32 s1, $9, 4;
    lop3.b32 t0, s0, mask, base, 0xEA;
    lop3.b32 t1, s1, mask, base, 0xEA;
    prmt.b32 $1, t0, t1, 0x5410;
    prmt.b32 $5, t0, t1, 0x7632;
    shr.u32 s0, $8, 8;
    shr.u32 s1, $9, 8;
    lop3.b32 t0, s0, mask, base, 0xEA;
    lop3.b32 t1, s1, mask, base, 0xEA;
    prmt.b32 $2, t0, t1, 0x5410;
    prmt.b32 $6, t0, t1, 0x7632;
    shr.u32 s0, $8, 12;
    shr.u32 s1, $9, 12;
    lop3.b32 t0, s0, mask, base, 0xEA;
    lop3.b32 t1, s1, mask, base, 0xEA;
    prmt.b32 $3, t0, t1, 0x5410;
    prmt.b32 $7, t0, t1, 0x7632;
    }"""
)


@triton.jit
def _planes(words):
    """128 + the codes of the eight planes, bfloat16: the work of _codes and _integers for two words at a time."""
    return tl.inline_asm_elementwise(
        _PLANES, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
    )


@triton.jit
def _of_group(at, first, n, there, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr):
    """Scales of the group that has input `first`; behind the last input those of the last group."""
    group = tl.minimum(first, INPUTS - 1) // GROUP
    return tl.load(at + group * OUTPUTS + n, mask=there, other=0).to(tl.float32)[:, None]


@triton.jit
def _of_plane(at, first, n, there, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr):
    """Scales (or minima) of the 32 inputs that begin with `first`: [BLOCK_N, 1], or [BLOCK_N, 32] of groups of 16."""
    found = _of_group(at, first, n, there, INPUTS, OUTPUTS, GROUP)
    if GROUP == 16:
        second = _of_group(at, first + 16, n, there, INPUTS, OUTPUTS, GROUP)
        found = tl.where((tl.arange(0, 32) < 16)[None, :], found, second)
    return found


@triton.jit
def _values(
    codes, scales, zeros, minima, table, first, n, there, dtype: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, ZEROS: tl.constexpr,
    MINIMA: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """The values of a plane [BLOCK_N, 32], rounded once."""
    scale = _of_plane(scales, first, n, there, INPUTS, OUTPUTS, GROUP)
    if TABLE:
        return (tl.load(table + codes) * scale).to(dtype)
    number = (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    if MINIMA:
        return (number * scale + _of_plane(minima, first, n, there, INPUTS, OUTPUTS, GROUP)).to(dtype)
    if ZEROS:
        return ((number - _of_plane(zeros, first, n, there, INPUTS, OUTPUTS, GROUP)) * scale).to(dtype)
    return ((number - ZERO) * scale).to(dtype)


@triton.jit
def _ask_for(line, FIRST, EACH: tl.constexpr, LINES: tl.constexpr):
    """Chunks of the rows, 128 bytes each, are brought to the L2 cache."""
    asked = line + (FIRST + tl.minimum(tl.arange(0, LINES), EACH - 1) * 32)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [asked], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rows"])
def _packed_gemm(
    x, low, high, scales, zeros, minima, table, bias, out, rows, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNKS: tl.constexpr,
    EACH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, ZEROS: tl.constexpr, MINIMA: tl.constexpr,
    TABLE: tl.constexpr, BIAS: tl.constexpr, AFTER: tl.constexpr, SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, LINES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """EACH: chunks of a part. SWAP: W x^T is computed, W being the operand with many rows."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * EACH
    there, inside = n < OUTPUTS, tl.arange(0, 32)
    row = tl.minimum(n, OUTPUTS - 1).to(tl.int64) * (CHUNKS * 32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        _ask_for(low + row[:, None], first * 32, EACH, LINES)
        tl.extra.cuda.gdc_wait()
    if SWAP:
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    else:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    dtype: tl.constexpr = x.dtype.element_ty
    for chunk in tl.range(first, min(first + EACH, CHUNKS), num_stages=STAGES):
        words = tl.load(low + row[:, None] + (chunk * 32 + inside)[None, :])
        others = words
        if BITS > 4:
            others = tl.load(high + row[:, None] + (chunk * 32 + inside)[None, :])
        scale = tl.zeros((BLOCK_N, 1), tl.float32)
        zero = tl.zeros((BLOCK_N, 1), tl.float32) + ZERO
        if ASM:
            planes = _planes(words)
        for j in tl.static_range(8):
            begin = chunk * 256 + j * 32
            k = begin + inside
            if INPUTS % 256 == 0:
                y = tl.load(x + m[:, None].to(tl.int64) * INPUTS + k[None, :], mask=(m < rows)[:, None], other=0.0)
            else:
                real = (m < rows)[:, None] & (k < INPUTS)[None, :]
                y = tl.load(x + m[:, None].to(tl.int64) * INPUTS + k[None, :], mask=real, other=0.0)
            codes = words if ASM else _codes(words, others, j, BITS)
            if AFTER:
                if (j * 32) % GROUP == 0:
                    scale = _of_group(scales, begin, n, there, INPUTS, OUTPUTS, GROUP)
                    if ZEROS:
                        zero = _of_group(zeros, begin, n, there, INPUTS, OUTPUTS, GROUP)
                if ASM:
                    w = planes[j] - (128.0 + zero).to(tl.bfloat16)
                else:
                    w = _integers(codes, zero, dtype, BITS)
                if SWAP:
                    total += tl.dot(w, y.T) * scale
                else:
                    total += tl.dot(y, w.T) * scale.T
            else:
                w = _values(
                    codes, scales, zeros, minima, table, begin, n, there, dtype,
                    INPUTS, OUTPUTS, GROUP, ZERO, ZEROS, MINIMA, TABLE,
                )  # fmt: skip
                if SWAP:
                    total = tl.dot(w, y.T, total)
                else:
                    total = tl.dot(y, w.T, total)
    if SWAP:
        total = total.T
    if BIAS:
        total += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[None, :]
    to = out + (tl.program_id(1) * rows + m)[:, None].to(tl.int64) * OUTPUTS + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(m < rows)[:, None] & there[None, :])


@triton.jit
def _decode(
    low, high, scales, zeros, minima, table, out,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNKS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    ZEROS: tl.constexpr, MINIMA: tl.constexpr, TABLE: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One chunk of BLOCK_N rows."""
    pdl.follow(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    chunk = tl.program_id(1)
    there, inside = n < OUTPUTS, tl.arange(0, 32)
    at = n.to(tl.int64)[:, None] * (CHUNKS * 32) + (chunk * 32 + inside)[None, :]
    words = tl.load(low + at, mask=there[:, None], other=0)
    others = words
    if BITS > 4:
        others = tl.load(high + at, mask=there[:, None], other=0)
    for j in tl.static_range(8):
        begin = chunk * 256 + j * 32
        w = _values(
            _codes(words, others, j, BITS), scales, zeros, minima, table, begin, n, there,
            out.dtype.element_ty, INPUTS, OUTPUTS, GROUP, ZERO, ZEROS, MINIMA, TABLE,
        )  # fmt: skip
        k = begin + inside
        to = out + n.to(tl.int64)[:, None] * INPUTS + k[None, :]
        tl.store(to, w, mask=there[:, None] & (k < INPUTS)[None, :])


class Shape(NamedTuple):
    """Sizes of a tile, parts of the inputs, warps, stages; whether the weight is the left operand."""

    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int
    swap: bool = False
    asm: bool = False


DECODED_ROWS = 96  # from more rows on the weight is decoded, as measured (docs/quantization.md)
SOON_DECODED_ROWS = 32  # the same where scales change from plane to plane, or codes take more to become numbers


def decode(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The values [outputs, inputs], in the order of the packed inputs."""
    out = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.low.device)
    block_n = 32
    _decode[(triton.cdiv(weight.outputs, block_n), weight.low.shape[1] // PLANE)](
        *tensors(weight), out, **constants(weight), BLOCK_N=block_n, num_warps=4, **pdl.options(out),
    )  # fmt: skip
    return out


@cache
def shape_for(rows: int, outputs: int, inputs: int, bits: int, group: int, device: torch.device) -> Shape:
    """The measured shape of these sizes; else one that gives every multiprocessor work."""
    known = tables.for_rows(_table().get((outputs, inputs, _use(bits, group)), []), rows)
    return known or default_shape(rows, outputs, inputs, device)


def _use(bits: int, group: int) -> str:
    return f"{bits} bits, groups of {min(group, CHUNK)}"


@cache
def _table() -> dict[tuple[int, int, str], list[tuple[int, int, Shape]]]:
    return {
        key: [(over, to, Shape(*shape)) for over, to, shape in rows]
        for key, rows in tables.products("packed_gemm").items()
    }


def default_shape(rows: int, outputs: int, inputs: int, device: torch.device) -> Shape:
    """The shape of a product that no table has."""
    block_m = min(64, max(16, triton.next_power_of_2(rows)))
    block_n = 128 if outputs >= 2048 else 64
    tiles = triton.cdiv(outputs, block_n) * triton.cdiv(rows, block_m)
    chunks, splits = triton.cdiv(inputs, CHUNK), 1
    while splits < 8 and tiles * splits < pdl.multiprocessors(device) - 12 and chunks >= 4 * splits:
        splits *= 2
    return Shape(
        block_m, block_n, splits, block_n // 16, 2 if block_m == 64 and splits == 1 else 4, swap=True, asm=True
    )


def parts(x: Tensor, weight: PackedWeight, shape: Shape, bias: Tensor | None = None) -> Tensor:
    """x [m, inputs] in the packed order -> [m, outputs], or float32 [splits, m, outputs]."""
    rows, chunks = x.shape[0], weight.low.shape[1] // PLANE
    assert shape.splits == 1 or bias is None
    out = outputs_for(x, weight, shape.splits)
    each = triton.cdiv(chunks, shape.splits)
    after = weight.group >= PLANE and weight.minima is None and weight.table is None and shape.block_m <= 32
    asm = shape.asm and x.is_cuda and after and weight.bits == 4 and x.dtype == torch.bfloat16
    _packed_gemm[(triton.cdiv(weight.outputs, shape.block_n), shape.splits, triton.cdiv(rows, shape.block_m))](
        x, *tensors(weight), x if bias is None else bias, out, rows, **constants(weight), EACH=each, BIAS=bias is not None,
        AFTER=after, SWAP=shape.swap, BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, STAGES=shape.stages,
        LINES=triton.next_power_of_2(each), ASM=asm, num_warps=shape.warps, **pdl.options(x),
    )  # fmt: skip
    return out


def one_row_of(weight: PackedWeight) -> tuple[Callable[..., Tensor], gemv.Shape]:
    """The kernel of one row for such a weight, and its shape."""
    sizes = weight.outputs, weight.inputs, weight.low.device
    if pairs.takes(weight):
        return pairs.parts, pairs.default_shape(*sizes)
    return gemv.parts, gemv.default_shape(*sizes)


def packed_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [m, inputs] -> [m, outputs]."""
    x = x.contiguous() if weight.order is None else x.index_select(1, weight.order)
    if weight.few_rows and x.shape[0] <= plan.MOST_ROWS:
        shape = plan.shape_for(x.shape[0], weight.outputs, weight.inputs, plan.kind_of(weight))
        if shape is not None:
            from meshlm.kernels.packed_few import kernel as packed_few  # its dialect takes long to import

            return packed_few.packed_few(x, weight, shape, bias)
    return usual_product(x, weight, bias)


def usual_product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """The same by the kernels here, of inputs in the packed order."""
    rows, outputs = x.shape[0], weight.outputs
    one_row = rows == 1 and weight.one_row
    simple = weight.bits == 4 and weight.minima is None and weight.group > PLANE
    most = (DECODED_ROWS if simple else SOON_DECODED_ROWS) if weight.some_rows else 0
    if not one_row and rows > most:
        return gemm(x, decode(weight, x.dtype), bias)
    if one_row:
        product, few = one_row_of(weight)
        if few.splits == 1:
            return product(x, weight, few, bias)
        found = product(x, weight, few)
    else:
        some = shape_for(rows, outputs, weight.inputs, weight.bits, weight.group, x.device)
        if some.splits == 1:
            return parts(x, weight, some, bias)
        found = parts(x, weight, some)
    summed = sum_parts(found, torch.empty(rows, outputs, dtype=x.dtype, device=x.device))
    return summed if bias is None else summed.add_(bias)
