"""A product of one row with a weight of 4 bits whose groups are of 128 inputs or more, two codes at a time:  out = x W^T

A word holds a code of each of its chunk's planes. Its halves are those of planes j and j + 4, 128 inputs apart, so of two groups: or-ed
into the mantissas of two float16 numbers they are 1024 (bits 0 to 3) or 64 (bits 4 to 7, times 1/16) too large, which is taken off with
the zero point, exactly. Four products are added in float16, then scaled and added up in float32. x is brought to float16 by a power of
two that makes its largest number less than 2, so no sum overflows:  4 * 15 * 2 * 16 < 65504.

Scales and zero points are asked for a chunk ahead.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.packed_gemm import gemv
from meshlm.kernels.packed_gemm.arguments import constants, outputs_for, tensors
from meshlm.kernels.packed_gemm.gemv import Shape
from meshlm.kernels.packed_gemm.reference import PLANE, PackedWeight

_ADDED: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 t, d, a, s, by;
    .reg .b16 l, h;
    mov.b32 by, 0x2C002C00;
    lop3.b32 t, $2, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 d, t, $7;
    mul.rn.f16x2 a, d, $3;
    lop3.b32 t, $2, 0x00F000F0, 0x64006400, 0xEA;
    fma.rn.f16x2 d, t, by, $8;
    fma.rn.f16x2 a, d, $4, a;
    shr.u32 s, $2, 8;
    lop3.b32 t, s, 0x000F000F, 0x64006400, 0xEA;
    sub.rn.f16x2 d, t, $7;
    fma.rn.f16x2 a, d, $5, a;
    lop3.b32 t, s, 0x00F000F0, 0x64006400, 0xEA;
    fma.rn.f16x2 d, t, by, $8;
    fma.rn.f16x2 a, d, $6, a;
    mov.b32 {l, h}, a;
    cvt.f32.f16 $0, l;
    cvt.f32.f16 $1, h;
    }"""
)


@triton.jit
def _pair(low, high):
    """Two float16 numbers as a word."""
    low = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _half(pair, UPPER: tl.constexpr):
    """One of a word's two numbers, float32."""
    bits = (pair >> 16) if UPPER else pair
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _plainly(words, pair_0, pair_1, pair_2, pair_3, zero, UPPER: tl.constexpr):
    """A half of what _ADDED does, without assembly and in float32, for the interpreter. words: their codes in the lower bits."""
    found = ((words & 15).to(tl.float32) - zero) * _half(pair_0, UPPER)
    found += (((words >> 4) & 15).to(tl.float32) - zero) * _half(pair_1, UPPER)
    found += (((words >> 8) & 15).to(tl.float32) - zero) * _half(pair_2, UPPER)
    return found + (((words >> 12) & 15).to(tl.float32) - zero) * _half(pair_3, UPPER)


@triton.jit
def _as_pairs(x, pairs, backs, INPUTS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Words of inputs that are 128 apart, times the power of two; what undoes that."""
    pdl.follow(PDL)
    word = tl.arange(0, BLOCK)
    at = word // 128 * 256 + word % 128
    low = tl.load(x + at, mask=at < INPUTS, other=0.0).to(tl.float32)
    high = tl.load(x + at + 128, mask=at + 128 < INPUTS, other=0.0).to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), axis=0)
    exponent = (tl.maximum(largest, 1e-30).to(tl.int32, bitcast=True) >> 23) & 255
    factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(pairs + word, _pair(low * factor, high * factor), mask=word < WORDS)
    tl.store(backs, (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit
def _of_chunk(at, chunk, n, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr):
    """What the two halves of a chunk have; behind the last input what the last group has."""
    first = tl.minimum(chunk * 256, INPUTS - 1) // GROUP
    second = tl.minimum(chunk * 256 + 128, INPUTS - 1) // GROUP
    return tl.load(at + first * OUTPUTS + n).to(tl.float32), tl.load(at + second * OUTPUTS + n).to(tl.float32)


@triton.jit
def _packed_pairs(
    pairs, backs, low, scales, zeros, bias, out,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNKS: tl.constexpr, EACH: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr,
    ZEROS: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """EACH: chunks of a part. LINES: that are asked for while the kernel before still runs, of each row."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * EACH
    end = tl.minimum(first + EACH, CHUNKS)
    there, inside = n < OUTPUTS, tl.arange(0, 32)
    n = tl.minimum(n, OUTPUTS - 1)
    row = n.to(tl.int64) * (CHUNKS * 32)
    scale, scale_on = _of_chunk(scales, first, n, INPUTS, OUTPUTS, GROUP)
    zero, zero_on = tl.full((BLOCK_N,), ZERO, tl.float32), tl.full((BLOCK_N,), ZERO, tl.float32)
    if ZEROS:
        zero, zero_on = _of_chunk(zeros, first, n, INPUTS, OUTPUTS, GROUP)
    total = tl.zeros((BLOCK_N, 32), tl.float32)
    if PDL:  # the scales above are the weight's own, and need not wait
        tl.extra.cuda.gdc_launch_dependents()
        asked = (low + row[:, None]) + (first + tl.minimum(tl.arange(0, LINES), EACH - 1))[None, :] * 32
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [asked], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.extra.cuda.gdc_wait()
    for chunk in tl.range(first, end, num_stages=STAGES):
        words = tl.load(low + row[:, None] + (chunk * 32 + inside)[None, :])
        at = pairs + chunk * 128 + inside
        next_scale, next_scale_on = _of_chunk(scales, chunk + 1, n, INPUTS, OUTPUTS, GROUP)
        next_zero, next_zero_on = zero, zero_on
        if ZEROS:
            next_zero, next_zero_on = _of_chunk(zeros, chunk + 1, n, INPUTS, OUTPUTS, GROUP)
        pair_0, pair_1 = tl.load(at)[None, :], tl.load(at + 32)[None, :]
        pair_2, pair_3 = tl.load(at + 64)[None, :], tl.load(at + 96)[None, :]
        if ASM:
            off_0 = _pair(1024.0 + zero, 1024.0 + zero_on)[:, None]
            off_1 = _pair(-64.0 - zero, -64.0 - zero_on)[:, None]
            lower, upper = tl.inline_asm_elementwise(
                _ADDED, "=f,=f,r,r,r,r,r,r,r", [words, pair_0, pair_1, pair_2, pair_3, off_0, off_1],
                dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            lower = _plainly(words, pair_0, pair_1, pair_2, pair_3, zero[:, None], False)
            upper = _plainly(words >> 16, pair_0, pair_1, pair_2, pair_3, zero_on[:, None], True)
        total += lower * scale[:, None] + upper * scale_on[:, None]
        scale, scale_on, zero, zero_on = next_scale, next_scale_on, next_zero, next_zero_on
    result = tl.sum(total, axis=1) * tl.load(backs)
    if BIAS:
        result += tl.load(bias + n).to(tl.float32)
    tl.store(out + tl.program_id(1) * OUTPUTS + n, result.to(out.dtype.element_ty), mask=there)


def default_shape(outputs: int, inputs: int, device: torch.device) -> Shape:
    """The shape of a product that was not measured: that of gemv.py, but large ones in parts too."""
    usual = gemv.default_shape(outputs, inputs, device)
    if usual.splits == 1 and usual.block_n == 64 and inputs >= 16 * 256:
        return Shape(64, 4, 4, 2)
    return usual


def takes(weight: PackedWeight) -> bool:
    """4 bits, with scales that count for the same half of all chunks."""
    return weight.bits == 4 and weight.group % 128 == 0 and weight.minima is None and weight.table is None


def parts(x: Tensor, weight: PackedWeight, shape: Shape, bias: Tensor | None = None) -> Tensor:
    chunks = weight.low.shape[1] // PLANE
    assert shape.splits == 1 or bias is None
    out = outputs_for(x, weight, shape.splits)
    each, options = triton.cdiv(chunks, shape.splits), pdl.options(x)
    low, _, scales, zeros, _, _ = tensors(weight)
    given = {name: value for name, value in constants(weight).items() if name not in ("BITS", "MINIMA", "TABLE")}
    words = torch.empty(chunks * 128, dtype=torch.int32, device=x.device)
    back = torch.empty(1, dtype=torch.float32, device=x.device)
    _as_pairs[(1,)](
        x, words, back, INPUTS=weight.inputs, WORDS=chunks * 128, BLOCK=triton.next_power_of_2(chunks * 128), num_warps=16,
        **options,
    )  # fmt: skip
    _packed_pairs[(triton.cdiv(weight.outputs, shape.block_n), shape.splits)](
        words, back, low, scales, zeros, x if bias is None else bias, out, **given, EACH=each, BIAS=bias is not None,
        BLOCK_N=shape.block_n, LINES=triton.next_power_of_2(each), STAGES=shape.stages, ASM=x.is_cuda,
        num_warps=shape.warps, **options,
    )  # fmt: skip
    return out
