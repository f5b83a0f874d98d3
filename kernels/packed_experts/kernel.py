"""Products of rows with the packed weights of their experts, decoded where they are multiplied:  out[r] = x[r] W[e(r)]^T + bias[e(r)]

    gate   two such products, of which kernels/moe_epilogue makes one row
    down   weighted, where results go to the places of their tokens

    few        up to 64 rows, not sorted, as in kernels/moe_few: each expert that is touched is read once
    sorted     rows as kernels/moe_align orders them: a tile of rows has one expert

A chunk of 128 inputs (layout.py) is four products of 32 columns of x with a plane of codes. The weight is the left operand: it has many
rows, where tokens may be few. Where a tile has few of them, integers are multiplied as they are, and a group's sum is scaled (AFTER).
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
from meshlm.kernels.packed_experts.decode import UP, codes_of, mxfp4_power, mxfp4_value, planes_of, scales_of
from meshlm.kernels.packed_experts.layout import CHUNK, ExpertWeight, table_of

GROUP_OF_TILES = 8  # tiles of rows that share columns of a weight
EACH_ROW = tl.constexpr(ROWS)
INPUTS_OF_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def _inputs_of(x_line, there, order, expert, k, INPUTS: tl.constexpr, COLUMNS: tl.constexpr, ORDER: tl.constexpr):
    """Inputs k of the rows of x, [BLOCK_M, 32]. COLUMNS: of x. ORDER: the weight's inputs are in an order of their own."""
    if ORDER:
        k = tl.load(order + expert.to(tl.int64) * INPUTS + k, mask=k < INPUTS, other=COLUMNS)
        return tl.load(x_line[:, None] + k[None, :], mask=there[:, None] & (k < COLUMNS)[None, :], other=0.0)
    return tl.load(x_line[:, None] + k[None, :], mask=there[:, None] & (k < INPUTS)[None, :], other=0.0)


@triton.jit
def _scales(scales, row, first, INPUTS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr):
    """Scales and offsets of the 32 inputs that begin with `first`: [n, 1], or [n, 32] of groups of 16. Behind the last input those of
    the last group."""
    at = scales + row[:, None] * GROUPS
    group = tl.minimum(first, INPUTS - 1) // GROUP
    scale, offset = scales_of(at + group, HALF)
    if GROUP == 16:
        next_scale, next_offset = scales_of(at + tl.minimum(group + 1, GROUPS - 1), HALF)
        is_first = (tl.arange(0, 32) < 16)[None, :]
        scale, offset = tl.where(is_first, scale, next_scale), tl.where(is_first, offset, next_offset)
    return scale, offset


@triton.jit
def _products(
    x_line, there, weight, expert, column,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, HALVES: tl.constexpr, FORMAT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """float32 [HALVES * BLOCK_N, BLOCK_M]: an expert's columns (of gate, then of up) for rows of x. x_line: where these begin."""
    MXFP4: tl.constexpr = FORMAT[0]
    BITS: tl.constexpr = FORMAT[1]
    GROUP: tl.constexpr = FORMAT[2]
    GROUPS: tl.constexpr = FORMAT[3]
    MINIMA: tl.constexpr = FORMAT[4]
    TABLE: tl.constexpr = FORMAT[5]
    HALF: tl.constexpr = FORMAT[6]
    COLUMNS: tl.constexpr = FORMAT[7]
    AFTER: tl.constexpr = FORMAT[8]
    ASM: tl.constexpr = FORMAT[9]
    ORDER: tl.constexpr = FORMAT[10]
    CHUNKS: tl.constexpr = (INPUTS + INPUTS_OF_CHUNK - 1) // INPUTS_OF_CHUNK
    WORDS: tl.constexpr = 64 if BITS == 8 else 32
    BEYOND: tl.constexpr = 16 * (BITS - 4)  # bytes of a chunk that hold the fifth and sixth bits
    codes, high, scales, table, order = weight
    nth, inside = tl.arange(0, HALVES * BLOCK_N), tl.arange(0, 32)
    output = tl.minimum(column * BLOCK_N + nth % BLOCK_N, OUTPUTS - 1)
    row = (expert * HALVES + nth // BLOCK_N).to(tl.int64) * OUTPUTS + output
    total = tl.zeros((HALVES * BLOCK_N, BLOCK_M), tl.float32)
    dtype: tl.constexpr = x_line.dtype.element_ty
    RAISED: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
        first, line = chunk * INPUTS_OF_CHUNK, (row * CHUNKS + chunk)[:, None]
        words = tl.load(codes + line * WORDS + inside[None, :])
        others = words
        if BITS == 8:
            others = tl.load(codes + line * WORDS + 32 + inside[None, :])
        elif BITS > 4:
            others = tl.load(high + line * BEYOND + (inside % BEYOND)[None, :])
        if MXFP4:
            scale = tl.load(scales + line)
        else:
            scale, offset = _scales(scales, row, first, INPUTS, GROUPS, GROUP, HALF)
        if ASM:
            planes = planes_of(words, dtype, MXFP4)
        products = tl.zeros((HALVES * BLOCK_N, BLOCK_M), tl.float32)
        for p in tl.static_range(4):
            y = _inputs_of(x_line, there, order, expert, inside + first + p * 32, INPUTS, COLUMNS, ORDER)
            if p > 0 and (p * 32) % GROUP == 0 and not MXFP4:
                scale, offset = _scales(scales, row, first + p * 32, INPUTS, GROUPS, GROUP, HALF)
            if MXFP4 and ASM:
                w = (planes[p] * UP) * mxfp4_power(scale, p)
            elif MXFP4:
                w = mxfp4_value(words, scale, p, dtype)
            elif AFTER and ASM:
                w = planes[p] - (RAISED + offset).to(dtype)
            elif AFTER:
                w = (codes_of(words, others, p, BITS).to(tl.float32) - offset).to(dtype)
            elif TABLE:
                w = (tl.load(table + codes_of(words, others, p, BITS)) * scale).to(dtype)
            elif MINIMA and ASM:
                w = (planes[p].to(tl.float32) * scale + (offset - RAISED * scale)).to(dtype)
            elif MINIMA:
                w = (codes_of(words, others, p, BITS).to(tl.float32) * scale + offset).to(dtype)
            elif ASM:
                w = (planes[p] - (RAISED + offset).to(dtype)) * scale.to(dtype)
            else:
                w = ((codes_of(words, others, p, BITS).to(tl.float32) - offset) * scale).to(dtype)
            if AFTER:
                products = tl.dot(w, y.T, products)
                if (p + 1) * 32 % GROUP == 0 or p == 3:
                    total += products * scale
                    products = tl.zeros((HALVES * BLOCK_N, BLOCK_M), tl.float32)
            else:
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
    x, weight, experts, weights, biases, out, rows,
    TOPK: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATE: tl.constexpr, BY_ENTRY: tl.constexpr,
    BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
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
            x + token.to(tl.int64) * FORMAT[7], real, weight, expert, column,
            INPUTS, OUTPUTS, 2 if GATE else 1, FORMAT, BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip
        place = entry if GATE else (entry % TOPK) * rows + m
        own = tl.load(weights + entry, mask=real, other=0.0)
        _store(
            total, out + place.to(tl.int64) * OUTPUTS, real, own, biases, expert, column,
            OUTPUTS, GATE, not GATE, BIAS, ALPHA, LIMIT, BLOCK_M, BLOCK_N,
        )  # fmt: skip


@triton.jit(do_not_specialize=["most", "rows", "entries"])
def _many(
    x, weight, ids, ends, owners, experts, weights, biases, out, most, rows, entries,
    EXPERTS: tl.constexpr, TOPK: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, GATE: tl.constexpr, GATHER: tl.constexpr,
    PARTS: tl.constexpr, BIAS: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HEIGHT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """most: tiles of rows that there may be.
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
    first = tl.program_id(0) // (HEIGHT * across) * HEIGHT
    height = tl.minimum(HEIGHT, most - first)
    within = tl.program_id(0) % (HEIGHT * across)
    tile, column = first + within % height, within // height
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
            x + token.to(tl.int64) * FORMAT[7], there, weight, expert, column,
            INPUTS, OUTPUTS, 2 if GATE else 1, FORMAT, BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip
        own = tl.zeros((BLOCK_M,), tl.float32)
        place = row
        if PARTS:
            entry = tl.where(there, entry, 0)
            own = tl.load(weights + entry, mask=there, other=0.0)
            place = (entry % TOPK) * rows + entry // TOPK
        _store(
            total, out + place.to(tl.int64) * OUTPUTS, there, own, biases, expert, column,
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
MOST_ROWS_AFTER = 32  # of a tile whose sums are scaled: of more it costs less to scale the weights
SHARED_BYTES = 227 << 10  # of an H200, for one program: stages of large tiles of float32 rows outgrow it


def few(
    x: Tensor, w: ExpertWeight, experts: Tensor, weights: Tensor | None, out: Tensor, shape: Shape, epilogue: Epilogue = PLAIN
) -> Tensor:  # fmt: skip
    """gate (no weights): x [m, k], w of 2 n outputs -> out [m topk, n]. down: x [m topk, k], w of n outputs -> float32 [topk, m, n].

    experts int32 [m, topk], -1 goes nowhere."""
    (rows, num_topk), num_experts, gate = experts.shape, w.codes.shape[0], weights is None
    assert rows <= MOST_ROWS
    outputs = w.outputs // 2 if gate else w.outputs
    by_entry = experts.numel() <= num_experts
    _few[(triton.cdiv(outputs, shape.block_n), experts.numel() if by_entry else num_experts)](
        x, _tensors(w), experts, x if weights is None else weights,
        x if epilogue.bias is None else epilogue.bias, out, rows, TOPK=num_topk, INPUTS=w.inputs, OUTPUTS=outputs, GATE=gate,
        BY_ENTRY=by_entry, **_options(shape, x, w, epilogue, max(LEAST_ROWS, triton.next_power_of_2(rows))),
    )  # fmt: skip
    return out


def sorted_rows(
    x: Tensor, w: ExpertWeight, out: Tensor, shape: Shape, rows: Rows, *, gate: bool = False, parts: Parts | None = None,
    epilogue: Epilogue = PLAIN,
) -> Tensor:  # fmt: skip
    """gate: x [tokens, k] -> out [rows, n], sorted. Else x [rows, k], sorted -> out [rows, n]; parts: float32 [topk, tokens, n]."""
    num_experts, block_m = w.codes.shape[0], shape.block_m
    outputs = w.outputs // 2 if gate else w.outputs
    most = most_tiles(rows.entries, num_experts, block_m)
    _many[(max(1, most) * triton.cdiv(outputs, shape.block_n),)](
        x, _tensors(w), rows.ids, rows.ends, rows.owners, rows.ids if parts is None else parts.experts,
        x if parts is None else parts.weights, x if epilogue.bias is None else epilogue.bias, out, most, out.shape[-2],
        0 if parts is None else parts.experts.numel(), EXPERTS=num_experts, TOPK=rows.num_topk, INPUTS=w.inputs, OUTPUTS=outputs,
        GATE=gate, GATHER=gate, PARTS=parts is not None, HEIGHT=GROUP_OF_TILES,
        **_options(shape, x, w, epilogue, block_m),
    )  # fmt: skip
    return out


def _tensors(w: ExpertWeight) -> tuple[Tensor, ...]:
    """Codes, the bits beyond the fourth, scales, table, order. What is not there is stood for by what is."""
    words = torch.int64 if w.scales.dtype == torch.float32 else torch.int32
    return (
        w.codes,
        w.codes if w.high is None else w.high,
        w.scales.view(words),
        table_of(w.format.values, w.codes.device) if w.format.has_table else w.codes,
        w.codes if w.order is None else w.order,
    )


HALVES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _format(w: ExpertWeight, dtype: torch.dtype, block_m: int) -> tuple[Any, ...]:
    """The constants that `_products` is compiled for: see its first lines."""
    bits, group, values = w.format
    sums_are_scaled = values == "integers" and group > 16 and block_m <= MOST_ROWS_AFTER and dtype != torch.float32
    in_halves = (torch.bfloat16,) if values == "mxfp4" else (torch.float16, torch.bfloat16)
    by_assembly = (
        not triton.knobs.runtime.interpret
        and bits == 4
        and not w.format.has_table
        and group > 16
        and dtype in in_halves
    )
    half = HALVES.get(w.scales.dtype, tl.float32)
    return (
        values == "mxfp4", bits, group, w.groups, values == "minima", w.format.has_table, half, w.columns or w.inputs, sums_are_scaled,
        by_assembly, w.order is not None,
    )  # fmt: skip


def _options(shape: Shape, x: Tensor, w: ExpertWeight, epilogue: Epilogue, block_m: int) -> dict[str, Any]:
    room = SHARED_BYTES // (block_m * CHUNK * x.element_size())  # for stages of x; weights' are small beside it
    stages = min(shape.stages, max(1, room))
    return {
        "BIAS": epilogue.bias is not None, "ALPHA": epilogue.alpha, "LIMIT": epilogue.limit,
        "FORMAT": _format(w, x.dtype, block_m), "BLOCK_M": block_m, "BLOCK_N": shape.block_n, "STAGES": stages,
        "num_warps": shape.warps, **pdl.options(x),
    }  # fmt: skip
