"""A product of one row with a packed weight (reference.py), bound by the reading of the weight:  out = x W^T

Each thread has some words and multiplies their codes with the inputs that these stand for, in float32. A code becomes a number where it
stands in its word: shifted to bit 16 or 12 and or-ed into the mantissa of 2^7 or 2^11, it is that much too large, which is taken off a
group's sum at once:

    sum_k (base_k + code_k) x_k - sum_k base_k x_k = sum_k code_k x_k            then times the scale, plus the minimum times sum_k x_k
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.packed_gemm.arguments import constants, outputs_for, tensors
from meshlm.kernels.packed_gemm.reference import PLANE, PackedWeight


@triton.jit
def _moved(words, BY: tl.constexpr):
    """Words shifted to the left, or to the right by a negative number."""
    if BY > 0:
        return words << BY
    elif BY < 0:
        return words >> -BY
    else:
        return words


@triton.jit
def _raised(words, others, J: tl.constexpr, BITS: tl.constexpr):
    """The codes of plane J, 128 too large in even planes (at bit 16), 2048 in odd ones and in all of 8 bits (at bit 12)."""
    EVEN: tl.constexpr = (J % 2 == 0) and (BITS < 8)
    AT: tl.constexpr = 16 if EVEN else 12
    found = _moved(words, AT - 4 * J) & (15 << AT)
    if BITS > 4:
        REST: tl.constexpr = BITS - 4
        found |= _moved(others, AT + 4 - REST * J) & (((1 << REST) - 1) << (AT + 4))
    if EVEN:
        found |= 0x43000000
    else:
        found |= 0x45000000
    return found.to(tl.float32, bitcast=True)


@triton.jit
def _of_group(at, first, n, there, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GROUP: tl.constexpr):
    """Scales of the group that has input `first`; behind the last input those of the last group."""
    group = tl.minimum(first, INPUTS - 1) // GROUP
    return tl.load(at + group * OUTPUTS + n, mask=there, other=0).to(tl.float32)[:, None]


@triton.jit
def _packed_gemv(
    x, low, high, scales, zeros, minima, table, bias, out,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, CHUNKS: tl.constexpr, EACH: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ZERO: tl.constexpr, ZEROS: tl.constexpr, MINIMA: tl.constexpr, TABLE: tl.constexpr, BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """EACH: chunks of a part."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * EACH
    there, inside = n < OUTPUTS, tl.arange(0, 32)
    row = tl.minimum(n, OUTPUTS - 1).to(tl.int64) * (CHUNKS * 32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        asked = (low + row[:, None]) + (first + tl.minimum(tl.arange(0, LINES), EACH - 1))[None, :] * 32
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [asked], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_N, 32), tl.float32)
    SPAN: tl.constexpr = min(GROUP, 256) // 32
    for chunk in tl.range(first, min(first + EACH, CHUNKS), num_stages=STAGES):
        words = tl.load(low + row[:, None] + (chunk * 32 + inside)[None, :])
        others = words
        if BITS > 4:
            others = tl.load(high + row[:, None] + (chunk * 32 + inside)[None, :]).to(tl.int32)
        summed = tl.zeros((BLOCK_N, 32), tl.float32)
        bases = tl.zeros((32,), tl.float32)
        inputs = tl.zeros((32,), tl.float32)
        for j in tl.static_range(8):
            k = chunk * 256 + j * 32 + inside
            if INPUTS % 256 == 0:
                y = tl.load(x + k).to(tl.float32)
            else:
                y = tl.load(x + k, mask=k < INPUTS, other=0.0).to(tl.float32)
            if TABLE:
                summed += tl.load(table + ((words >> (4 * j)) & 15)) * y[None, :]
            else:
                summed += _raised(words, others, j, BITS) * y[None, :]
                if j % 2 == 0 and BITS < 8:
                    bases += 128.0 * y
                else:
                    bases += 2048.0 * y
                inputs += y
            if (j + 1) % SPAN == 0:
                at = chunk * 256 + (j + 1 - SPAN) * 32
                scale = _of_group(scales, at, n, there, INPUTS, OUTPUTS, GROUP)
                if TABLE:
                    total += summed * scale
                elif MINIMA:
                    least = _of_group(minima, at, n, there, INPUTS, OUTPUTS, GROUP)
                    total += (summed - bases[None, :]) * scale + least * inputs[None, :]
                else:
                    zero = tl.zeros((BLOCK_N, 1), tl.float32) + ZERO
                    if ZEROS:
                        zero = _of_group(zeros, at, n, there, INPUTS, OUTPUTS, GROUP)
                    total += (summed - bases[None, :] - zero * inputs[None, :]) * scale
                summed = tl.zeros((BLOCK_N, 32), tl.float32)
                bases = tl.zeros((32,), tl.float32)
                inputs = tl.zeros((32,), tl.float32)
    result = tl.sum(total, axis=1)
    if BIAS:
        result += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(1) * OUTPUTS + n, result.to(out.dtype.element_ty), mask=there)


class Shape(NamedTuple):
    """Outputs of a program, parts of the inputs, warps, stages."""

    block_n: int
    splits: int
    warps: int
    stages: int


def takes(weight: PackedWeight) -> bool:
    """Groups must be whole planes."""
    return weight.group >= PLANE


def default_shape(outputs: int, inputs: int, device: torch.device) -> Shape:
    """The shape of a product that was not measured."""
    chunks, splits, programs = triton.cdiv(inputs, 256), 1, 2 * pdl.multiprocessors(device)
    block_n = 64 if outputs // 64 >= programs else 32
    while splits < 8 and triton.cdiv(outputs, block_n) * splits < programs and chunks >= 4 * splits:
        splits *= 2
    return Shape(block_n, splits, 4, 4)


def parts(x: Tensor, weight: PackedWeight, shape: Shape, bias: Tensor | None = None) -> Tensor:
    """x [1, inputs] in the packed order -> [1, outputs], or float32 [splits, 1, outputs]."""
    chunks = weight.low.shape[1] // PLANE
    assert shape.splits == 1 or bias is None
    out = outputs_for(x, weight, shape.splits)
    each = triton.cdiv(chunks, shape.splits)
    _packed_gemv[(triton.cdiv(weight.outputs, shape.block_n), shape.splits)](
        x, *tensors(weight), x if bias is None else bias, out, **constants(weight), EACH=each, BIAS=bias is not None,
        BLOCK_N=shape.block_n, STAGES=shape.stages, LINES=triton.next_power_of_2(each), num_warps=shape.warps,
        **pdl.options(x),
    )  # fmt: skip
    return out
