"""Products of rows with the MXFP4 weights of their experts, decoded where they are multiplied:  out[r] = x[r] W[e(r)]^T + bias[e(r)]

    gate   two such products, of which kernels/moe_epilogue makes one row
    down   weighted, where results go to the places of their tokens

    few        up to 64 rows, not sorted, as in kernels/moe_few: each expert that is touched is read once
    sorted     rows as kernels/moe_align orders them: a tile of rows has one expert
    batched    x [experts, most, k], of which the first num_tokens[e] rows of each expert are real

A chunk of 128 inputs (layout.py) is four products of 32 columns of x with a plane of codes. A code's bits, moved to exponent and
mantissa of a bfloat16, are its value times 2^-126, exactly; two products with powers of two make it the weight. The weight is the left
operand: it has many rows, where tokens may be few.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.moe_align.kernel import ROWS, most_tiles
from meshlm.kernels.moe_epilogue.kernel import PLAIN, Epilogue, activated
from meshlm.kernels.moe_few.kernel import entries_of
from meshlm.kernels.mxfp4_experts.layout import CHUNK, MXFP4Weight

GROUP = 8  # tiles of rows that share columns of a weight
EACH_ROW = tl.constexpr(ROWS)
INPUTS_OF_CHUNK = tl.constexpr(CHUNK)
UP = tl.constexpr(2.0**126)

_PLANES: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 mask, t, s;
    mov.b32 mask, 0x81C081C0;
    and.b32 $0, $4, mask;
    shl.b32 t, $4, 3;
    and.b32 $1, t, mask;
    shl.b32 t, $4, 6;
    and.b32 $2, t, mask;
    shr.u32 t, $4, 6;
    shr.u32 s, $4, 4;
    and.b32 t, t, 0x01800180;
    lop3.b32 t, s, 0x00400040, t, 0xEA;
    shl.b32 s, $4, 4;
    lop3.b32 $3, s, 0x80008000, t, 0xEA;
    }"""
)


@triton.jit
def planes_of(words):
    """int16 -> the codes of the four planes, as bfloat16 of 2^-126 times their value: two words at a time."""
    return tl.inline_asm_elementwise(_PLANES, "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2)


@triton.jit
def value_of(words, scale, P: tl.constexpr, dtype: tl.constexpr):
    """The weights of plane P. words int16 [n, 32], scale int32 [n, 1]: four e8m0."""
    word = words.to(tl.int32)
    if P < 3:
        bits = (word << (3 * P)) & 0x81C0
    else:
        bits = ((word >> 6) & 0x0180) | ((word >> 4) & 0x0040) | ((word << 4) & 0x8000)
    number = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True) * UP
    power = (scale >> (8 * P)).to(tl.uint32) & 255
    return (number * tl.where(power == 0, 0x400000, power << 23).to(tl.float32, bitcast=True)).to(dtype)


@triton.jit
def power_of(scale, P: tl.constexpr):
    """2 to the scale of plane P, bfloat16."""
    power = (scale >> (8 * P)) & 255
    return tl.where(power == 0, 0x40, power << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _products(
    x_line, there, codes, scales, expert, column,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, HALVES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """float32 [HALVES * BLOCK_N, BLOCK_M]: an expert's columns (of gate, then of up) for rows of x. x_line: where these begin."""
    CHUNKS: tl.constexpr = (INPUTS + INPUTS_OF_CHUNK - 1) // INPUTS_OF_CHUNK
    nth, inside = tl.arange(0, HALVES * BLOCK_N), tl.arange(0, 32)
    output = tl.minimum(column * BLOCK_N + nth % BLOCK_N, OUTPUTS - 1)
    line = ((expert * HALVES + nth // BLOCK_N).to(tl.int64) * OUTPUTS + output) * CHUNKS
    total = tl.zeros((HALVES * BLOCK_N, BLOCK_M), tl.float32)
    dtype: tl.constexpr = x_line.dtype.element_ty
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        words = tl.load(codes + (line + chunk)[:, None] * 32 + inside[None, :])
        scale = tl.load(scales + line + chunk)[:, None]
        if ASM:
            planes = planes_of(words)
        for p in tl.static_range(4):
            k = chunk * INPUTS_OF_CHUNK + p * 32 + inside
            y = tl.load(x_line[:, None] + k[None, :], mask=there[:, None] & (k < INPUTS)[None, :], other=0.0)
            if ASM:
                w = (planes[p] * UP) * power_of(scale, p)
            else:
                w = value_of(words, scale, p, dtype)
            total = tl.dot(w, y.T, total)
    return total


@triton.jit
def _store(
    total, out_line, there, weights, biases, expert, column,
    OUTPUTS: tl.constexpr, GATE: tl.constexpr, WEIGHTED: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The rows of a tile, at out_line [BLOCK_M]; weights float32 [BLOCK_M]."""
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype: tl.constexpr = out_line.dtype.element_ty
    bias = biases + expert.to(tl.int64) * ((2 if GATE else 1) * OUTPUTS) + n
    if GATE:
        gate, up = total.reshape(2, BLOCK_N, BLOCK_M).permute(1, 2, 0).split()
        if BIAS:
            gate += tl.load(bias, mask=n < OUTPUTS, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + OUTPUTS, mask=n < OUTPUTS, other=0.0).to(tl.float32)[:, None]
        total = activated(gate, up, dtype, ALPHA, LIMIT)
    elif BIAS:
        total += tl.load(bias, mask=n < OUTPUTS, other=0.0).to(tl.float32)[:, None]
    if WEIGHTED:
        total *= weights[None, :]
    tl.store(out_line[:, None] + n[None, :], total.T.to(dtype), mask=there[:, None] & (n < OUTPUTS)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _few(
    x, codes, scales, experts, weights, biases, out, rows,
    TOPK: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATE: tl.constexpr, BY_ENTRY: tl.constexpr,
    BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As in kernels/moe_few: a program belongs to an expert, or to an entry, of which an expert's first computes it."""
    column, lead, m = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    pdl.follow(PDL)
    expert, entry, live = entries_of(
        experts, out, lead, n, rows, TOPK, OUTPUTS, GATE, BY_ENTRY, BLOCK_M, BLOCK_N
    )  # fmt: skip
    if live == 1:
        real, entry = entry >= 0, tl.maximum(entry, 0)
        token = m if GATE else entry
        total = _products(
            x + token.to(tl.int64) * INPUTS, real, codes, scales, expert, column,
            INPUTS, OUTPUTS, 2 if GATE else 1, BLOCK_M, BLOCK_N, STAGES, ASM,
        )  # fmt: skip
        place = entry if GATE else (entry % TOPK) * rows + m
        weight = tl.load(weights + entry, mask=real, other=0.0)
        _store(
            total, out + place.to(tl.int64) * OUTPUTS, real, weight, biases, expert, column,
            OUTPUTS, GATE, not GATE, BIAS, ALPHA, LIMIT, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit(do_not_specialize=["most", "rows", "entries"])
def _many(
    x, codes, scales, ids, ends, owners, experts, weights, biases, out, most, rows, entries,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATE: tl.constexpr, GATHER: tl.constexpr,
    BATCHED: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """most: tiles of rows that there may be; batched: of each expert, which has `rows` rows in x and out, ends being num_tokens.
    GATHER: x is in the order of tokens. PARTS: out [TOPK, rows, OUTPUTS], with zeros for the entries of experts that go nowhere."""
    across: tl.constexpr = (OUTPUTS + BLOCK_N - 1) // BLOCK_N
    pdl.follow(PDL)
    if PARTS:
        for nth in tl.range(tl.program_id(0), entries, tl.num_programs(0)):
            if tl.load(experts + nth) < 0:
                to = out + ((nth % TOPK) * rows + nth // TOPK).to(tl.int64) * OUTPUTS
                for begin in tl.range(0, OUTPUTS, BLOCK_N):
                    n = begin + tl.arange(0, BLOCK_N)
                    tl.store(to + n, tl.zeros((BLOCK_N,), out.dtype.element_ty), mask=n < OUTPUTS)
    down = most * (EXPERTS if BATCHED else 1)
    first = tl.program_id(0) // (GROUP * across) * GROUP
    height = tl.minimum(GROUP, down - first)
    within = tl.program_id(0) % (GROUP * across)
    tile, column = first + within % height, within // height
    if BATCHED:
        expert = tile // most
        row = tile % most * BLOCK_M + tl.arange(0, BLOCK_M)
        count = tl.load(ends + expert)
        live = (tile % most * BLOCK_M < count).to(tl.int32)
        there, token = row < count, expert * rows + row
        entry = token
    else:
        live = (tile < tl.load(ends + EXPERTS - 1)).to(tl.int32)
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        expert = tl.load(owners + tile * live) % EACH_ROW
        there, token, entry = row >= 0, row, row
        if GATHER or PARTS:
            entry = tl.load(ids + row * live)
            there = entry >= 0
        if GATHER:
            token = tl.where(there, entry // TOPK, 0)
    if live == 1:
        total = _products(
            x + token.to(tl.int64) * INPUTS, there, codes, scales, expert, column,
            INPUTS, OUTPUTS, 2 if GATE else 1, BLOCK_M, BLOCK_N, STAGES, ASM,
        )  # fmt: skip
        weight = tl.zeros((BLOCK_M,), tl.float32)
        place = token if BATCHED else row
        if PARTS:
            entry = tl.where(there, entry, 0)
            weight = tl.load(weights + entry, mask=there, other=0.0)
            place = (entry % TOPK) * rows + entry // TOPK
        _store(
            total, out + place.to(tl.int64) * OUTPUTS, there, weight, biases, expert, column,
            OUTPUTS, GATE, PARTS, BIAS, ALPHA, LIMIT, BLOCK_M, BLOCK_N,
        )  # fmt: skip


class Shape(NamedTuple):
    """Sizes of a tile (block_n: of a gate's columns, and as many of up's), warps, stages. Few rows have their own block_m."""

    block_m: int
    block_n: int
    warps: int
    stages: int


class Rows(NamedTuple):
    """Sorted rows, as moe_align orders them for tiles of a block_m, and how many entries there are at most."""

    ids: Tensor
    ends: Tensor
    owners: Tensor
    num_topk: int
    entries: int


class Parts(NamedTuple):
    """Results go to the places of their tokens, weighted: as kernels/moe_few leaves them. Both [m, topk]."""

    experts: Tensor
    weights: Tensor


LEAST_ROWS, MOST_ROWS = 16, 64  # of a tile of few rows
SHARED_BYTES = 227 << 10  # of an H200, for one program: stages of large tiles of float32 rows outgrow it


def few(
    x: Tensor, w: MXFP4Weight, experts: Tensor, weights: Tensor | None, out: Tensor, shape: Shape, epilogue: Epilogue = PLAIN
) -> Tensor:  # fmt: skip
    """gate (no weights): x [m, k], w of 2 n outputs -> out [m topk, n]. down: x [m topk, k], w of n outputs -> float32 [topk, m, n].

    experts int32 [m, topk], -1 goes nowhere.
    """
    (rows, num_topk), num_experts, gate = experts.shape, w.codes.shape[0], weights is None
    assert rows <= MOST_ROWS
    outputs = w.codes.shape[1] // 2 if gate else w.codes.shape[1]
    by_entry = experts.numel() <= num_experts
    _few[(triton.cdiv(outputs, shape.block_n), experts.numel() if by_entry else num_experts)](
        x, w.codes, w.scales.view(torch.int32), experts, x if weights is None else weights,
        x if epilogue.bias is None else epilogue.bias, out, rows, TOPK=num_topk, INPUTS=w.inputs, OUTPUTS=outputs, GATE=gate,
        BY_ENTRY=by_entry, **_options(shape, x, epilogue, max(LEAST_ROWS, triton.next_power_of_2(rows))),
    )  # fmt: skip
    return out


def sorted_rows(
    x: Tensor, w: MXFP4Weight, out: Tensor, shape: Shape, rows: Rows, *, gate: bool = False, parts: Parts | None = None,
    epilogue: Epilogue = PLAIN,
) -> Tensor:  # fmt: skip
    """gate: x [tokens, k] -> out [rows, n], sorted. Else x [rows, k], sorted -> out [rows, n]; parts: float32 [topk, tokens, n]."""
    num_experts, block_m = w.codes.shape[0], shape.block_m
    outputs = w.codes.shape[1] // 2 if gate else w.codes.shape[1]
    most = most_tiles(rows.entries, num_experts, block_m)
    _many[(max(1, most) * triton.cdiv(outputs, shape.block_n),)](
        x, w.codes, w.scales.view(torch.int32), rows.ids, rows.ends, rows.owners, rows.ids if parts is None else parts.experts,
        x if parts is None else parts.weights, x if epilogue.bias is None else epilogue.bias, out, most, out.shape[-2],
        0 if parts is None else parts.experts.numel(), EXPERTS=num_experts, TOPK=rows.num_topk, INPUTS=w.inputs, OUTPUTS=outputs,
        GATE=gate, GATHER=gate, BATCHED=False, PARTS=parts is not None, GROUP=GROUP, **_options(shape, x, epilogue, block_m),
    )  # fmt: skip
    return out


def batched_rows(
    x: Tensor, w: MXFP4Weight, out: Tensor, shape: Shape, num_tokens: Tensor, *, gate: bool = False, epilogue: Epilogue = PLAIN
) -> Tensor:  # fmt: skip
    """x [experts, most, k], num_tokens int32 [experts] -> out [experts, most, n]; what lies behind num_tokens is anything."""
    num_experts, rows = x.shape[:2]
    outputs, most = out.shape[2], triton.cdiv(rows, shape.block_m)
    _many[(num_experts * most * triton.cdiv(outputs, shape.block_n),)](
        x, w.codes, w.scales.view(torch.int32), num_tokens, num_tokens, num_tokens, num_tokens, x,
        x if epilogue.bias is None else epilogue.bias, out, most, rows, 0, EXPERTS=num_experts, TOPK=1, INPUTS=w.inputs,
        OUTPUTS=outputs, GATE=gate, GATHER=False, BATCHED=True, PARTS=False, GROUP=GROUP,
        **_options(shape, x, epilogue, shape.block_m),
    )  # fmt: skip
    return out


def _options(shape: Shape, x: Tensor, epilogue: Epilogue, block_m: int) -> dict[str, Any]:
    room = SHARED_BYTES // (block_m * CHUNK * x.element_size())  # for stages of x; weights' are small beside it
    stages = min(shape.stages, max(1, room))
    return {
        "BIAS": epilogue.bias is not None, "ALPHA": epilogue.alpha, "LIMIT": epilogue.limit, "BLOCK_M": block_m,
        "BLOCK_N": shape.block_n, "STAGES": stages, "ASM": x.is_cuda and x.dtype == torch.bfloat16,
        "num_warps": shape.warps, **pdl.options(x),
    }  # fmt: skip
