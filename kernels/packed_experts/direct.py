"""Products of a few rows of each expert with its packed weights of 4 bits, as kernel.py computes them, without moves between threads.

As in kernels/packed_few every thread loads the words that its own place in a tile of the tensor cores asks for (operands.py). The warps
of a program share its columns and have chunks of their own; they add up at the end, in a fixed order. Integers are multiplied as they
are, raised by a base; what that is too much, and zero points, are taken off a group's sum by the sum of its inputs, which tensor
cores find too, as a product with ones:

    sum_k (base + code_k) x_k - (base + zero) sum_k x_k = sum_k (code_k - zero) x_k               then times the scale

    few       up to 16 rows, not sorted: each expert that is touched is read once (kernels/moe_few)
    sorted    rows as kernels/moe_align orders them, in tiles of 8, 16 or 32

In Triton's Gluon dialect, for GPUs of compute capability 8.0 and later. Used where the tuner has measured that it is faster.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from meshlm.kernels import pdl
from meshlm.kernels.moe_align.kernel import ROWS as _ROWS
from meshlm.kernels.moe_align.kernel import most_tiles
from meshlm.kernels.moe_epilogue.kernel import PLAIN, Epilogue
from meshlm.kernels.packed_experts.kernel import Parts, Rows
from meshlm.kernels.packed_experts.layout import CHUNK, ExpertWeight, chunks_of
from meshlm.kernels.packed_experts.operands import (
    PAIR,
    factors_of,
    integer_operand,
    layout_of_inputs,
    layout_of_words,
    load_inputs,
    load_weights,
    mxfp4_operand,
    right_operand,
)
from meshlm.kernels.packed_experts.plan import DIRECT_ROWS, DirectShape
from meshlm.kernels.packed_few.layouts import along, empty_tuple, pin_loads, range_of, spread

MARK = gl.constexpr(_ROWS)  # moe_align: what an owner's number of rows is multiplied by
NONE = gl.constexpr(0x7FFFFFFF)  # an entry behind all others


@gluon.jit
def _accumulate(
    total, others, found, ones, x_at, x_part, inside, chunk,
    INPUTS: gl.constexpr, LINES: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr, PDL: gl.constexpr,
    MXFP4: gl.constexpr, SPANS: gl.constexpr, MINIMA: gl.constexpr, HALF: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """total and the products of a turn's chunks, of which `found` was loaded. EARLY: all inputs are loaded first, and the
    products of every other plane go to `others`, since tensor cores wait for the last product of a sum."""
    SUMS: gl.constexpr = total.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    BASE: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    inputs = empty_tuple()
    for nth in gl.static_range(4 * PAIR if EARLY else 0):
        inputs = inputs + (load_inputs(x_at, x_part, inside, chunk + nth // 4, nth % 4, INPUTS, MXFP4),)
    if PDL and EARLY:
        pin_loads(WARPS)
    for nth in gl.static_range(PAIR):
        words = found[nth * (1 + SPANS)]
        if MXFP4:
            factors = factors_of(found[nth * (1 + SPANS) + 1])
        for p in gl.static_range(4):
            loaded = inputs[4 * nth + p] if EARLY else load_inputs(x_at, x_part, inside, chunk + nth, p, INPUTS, MXFP4)
            y = right_operand(loaded, RIGHT, COLUMNS, WARPS)
            if MXFP4:
                weights = mxfp4_operand(words, factors[p % 2], p, LEFT, LINES, WARPS)
                if p % 2 == 0 or not EARLY:
                    total = mma_v2(weights, y, total)
                else:
                    others = mma_v2(weights, y, others)
            else:
                if p * SPANS % 4 == 0:
                    products = gl.zeros([WARPS, LINES, COLUMNS], gl.float32, SUMS)
                    sums = gl.zeros([WARPS, 16, COLUMNS], gl.float32, SUMS)
                products = mma_v2(integer_operand(words, p, dtype, LEFT, LINES, WARPS), y, products)
                sums = mma_v2(ones, y, sums)
                if (p + 1) * SPANS % 4 == 0:
                    both = found[nth * (1 + SPANS) + 1 + p * SPANS // 4]
                    scale = both.to(gl.int16).to(HALF, bitcast=True).to(gl.float32)
                    offset = (both >> 16).to(gl.int16).to(HALF, bitcast=True).to(gl.float32)
                    sums = gl.reshape(sums, [WARPS, 1, 16, COLUMNS]).broadcast_to([WARPS, LINES // 16, 16, COLUMNS])
                    sums = gl.convert_layout(gl.reshape(sums, [WARPS, LINES, COLUMNS]), SUMS, assert_trivial=True)
                    if MINIMA:
                        total += (products - BASE * sums) * scale + offset * sums
                    else:
                        total += (products - (BASE + offset) * sums) * scale
    return total, others


@gluon.jit
def _products(
    x, token, codes, scales, expert, column,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, HALVES: gl.constexpr, TILES: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr,
    DEPTH: gl.constexpr, PDL: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """float32 [16 * TILES, COLUMNS]: an expert's lines (of gate, then of up) for rows of x. token: [1, 1, 1, COLUMNS]. DEPTH: turns
    that are under way at once."""
    MXFP4: gl.constexpr = FORMAT[0]
    GROUP: gl.constexpr = FORMAT[1]
    GROUPS: gl.constexpr = FORMAT[2]
    MINIMA: gl.constexpr = FORMAT[3]
    HALF: gl.constexpr = FORMAT[4]
    SPANS: gl.constexpr = 128 // GROUP if GROUP < 128 else 1
    dtype: gl.constexpr = x.dtype.element_ty
    LINES: gl.constexpr = 16 * TILES
    BLOCK: gl.constexpr = LINES // HALVES
    CHUNKS: gl.constexpr = (INPUTS + 127) // 128
    TURNS: gl.constexpr = (CHUNKS + PAIR * WARPS - 1) // (PAIR * WARPS)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    EARLY: gl.constexpr = COLUMNS == 8  # there is room in registers
    WORDS: gl.constexpr = layout_of_words(TILES, WARPS)
    PLACES: gl.constexpr = layout_of_inputs(COLUMNS, WARPS)

    nth = range_of(LINES, WORDS, 1, 4)
    output = gl.minimum(column * BLOCK + nth % BLOCK, OUTPUTS - 1)
    part = range_of(WARPS, WORDS, 0, 4) * PAIR
    line = (expert * HALVES + nth // BLOCK).to(gl.int64) * OUTPUTS + output
    words_at = codes + (line * CHUNKS + part) * 16 + range_of(4, WORDS, 2, 4) * 4 + range_of(4, WORDS, 3, 4)
    o_part = part
    if not MXFP4:
        nth = range_of(LINES, SUMS, 1, 3)
        output = gl.minimum(column * BLOCK + nth % BLOCK, OUTPUTS - 1)
        line = (expert * HALVES + nth // BLOCK).to(gl.int64) * OUTPUTS + output
        o_part = range_of(WARPS, SUMS, 0, 3) * PAIR
    scales_at = scales + line * GROUPS
    if GROUP <= 128:
        scales_at += o_part * SPANS
    x_part = range_of(WARPS, PLACES, 0, 4) * (PAIR * 128)
    inside = range_of(4, PLACES, 1, 4) * 8 + range_of(8, PLACES, 2, 4)
    x_at = x + token.to(gl.int64) * INPUTS

    ones = gl.full([WARPS, 16, 32], 1.0, dtype, gl.DotOperandLayout(0, SUMS, 2))
    total = gl.zeros([WARPS, LINES, COLUMNS], gl.float32, SUMS)
    others = total
    prefetched = empty_tuple()
    STEP: gl.constexpr = PAIR * WARPS
    for turn in gl.static_range(DEPTH if DEPTH < TURNS else TURNS):
        prefetched = prefetched + (
            load_weights(words_at, scales_at, part, o_part, turn * STEP, INPUTS, CHUNKS, GROUPS, GROUP, SPANS),
        )
    if DEPTH < TURNS:
        for begin in range(0, TURNS, DEPTH):
            for turn in gl.static_range(DEPTH):
                chunk = (begin + turn) * STEP
                later = chunk + DEPTH * STEP
                prefetched = prefetched + (
                    load_weights(words_at, scales_at, part, o_part, later, INPUTS, CHUNKS, GROUPS, GROUP, SPANS),
                )
                total, others = _accumulate(
                    total, others, prefetched[0], ones, x_at, x_part, inside, chunk,
                    INPUTS, LINES, COLUMNS, WARPS, EARLY, PDL, MXFP4, SPANS, MINIMA, HALF, dtype,
                )  # fmt: skip
                prefetched = prefetched[1:]
    else:
        for turn in gl.static_range(TURNS):
            chunk = turn * STEP
            total, others = _accumulate(
                total, others, prefetched[turn], ones, x_at, x_part, inside, chunk,
                INPUTS, LINES, COLUMNS, WARPS, EARLY, PDL, MXFP4, SPANS, MINIMA, HALF, dtype,
            )  # fmt: skip
    if EARLY:
        total += others
    return gl.sum(total, axis=0)


@gluon.jit
def _activated(gate, up, dtype: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr):
    """See kernels/moe_epilogue."""
    gate = gate.to(dtype).to(gl.float32)
    up = up.to(dtype).to(gl.float32)
    if ALPHA > 0 and LIMIT == 0:
        gate = (gate / (1.0 + gl.exp(-ALPHA * (gate + 0.044715 * gate * gate * gate)))).to(dtype).to(gl.float32)
    elif ALPHA > 0:
        gate = gl.minimum(gate, LIMIT)
        up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT) + 1.0
        gate = gate / (1.0 + gl.exp(-ALPHA * gate))
    else:
        gate = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
    return gate * up


@gluon.jit
def _result(
    total, biases, expert, column,
    OUTPUTS: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, BLOCK: gl.constexpr,
    COLUMNS: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """float32 [BLOCK, COLUMNS], with the biases, of gate and up what kernels/moe_epilogue makes of them; and the outputs [BLOCK, 1]."""
    if GATE:
        gate, up = gl.split(gl.permute(gl.reshape(total, [2, BLOCK, COLUMNS]), [1, 2, 0]))
        HALF: gl.constexpr = gate.type.layout
        n = column * BLOCK + range_of(BLOCK, HALF, 0, 2)
        if BIAS:
            bias = biases + expert.to(gl.int64) * (2 * OUTPUTS) + n
            gate += gl.load(bias, mask=n < OUTPUTS, other=0.0).to(gl.float32)
            up += gl.load(bias + OUTPUTS, mask=n < OUTPUTS, other=0.0).to(gl.float32)
        return _activated(gate, up, dtype, ALPHA, LIMIT), n
    else:
        WHOLE: gl.constexpr = total.type.layout
        n = column * BLOCK + range_of(BLOCK, WHOLE, 0, 2)
        if BIAS:
            total += gl.load(biases + expert.to(gl.int64) * OUTPUTS + n, mask=n < OUTPUTS, other=0.0).to(gl.float32)
        return total, n


@gluon.jit
def _entries(experts, expert, rows, TOPK: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """The entries of the rows that go to the expert; -1: a row does not."""
    m = gl.arange(0, COLUMNS, LAYOUT)
    entry = gl.full([COLUMNS], -1, gl.int32, LAYOUT)
    for j in gl.static_range(TOPK):
        one = gl.load(experts + m * TOPK + j, mask=m < rows, other=-1)
        entry = gl.where((one == expert) & (one >= 0), m * TOPK + j, entry)
    return entry


@gluon.jit
def _say_nothing(
    experts, out, column, rows,
    TOPK: gl.constexpr, OUTPUTS: gl.constexpr, BLOCK: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Zeros for what goes nowhere."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, WARPS], [1, 0])
    m, n = range_of(COLUMNS, LAYOUT, 0, 2), column * BLOCK + range_of(BLOCK, LAYOUT, 1, 2)
    for j in gl.static_range(TOPK):
        nowhere = (m < rows) & (gl.load(experts + m * TOPK + j, mask=m < rows, other=0) < 0)
        gl.store(
            out + (j * rows + m).to(gl.int64) * OUTPUTS + n,
            gl.zeros([COLUMNS, BLOCK], gl.float32, LAYOUT),
            mask=nowhere & (n < OUTPUTS),
        )


@gluon.jit(do_not_specialize=["rows"])
def _few(
    x, codes, scales, experts, weights, biases, out, rows,
    TOPK: gl.constexpr, INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, GATE: gl.constexpr, BY_ENTRY: gl.constexpr, BIAS: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, TILES: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr,
    PDL: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """A program belongs to an expert, or to an entry, of which an expert's first computes it."""
    HALVES: gl.constexpr = 2 if GATE else 1
    BLOCK: gl.constexpr = 16 * TILES // HALVES
    TOKENS: gl.constexpr = along(layout_of_inputs(COLUMNS, WARPS), 3, 4)
    column, lead = gl.program_id(0), gl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if not GATE:  # noqa: SIM102 (a constant of the compiler, and a value of the device)
        if lead == 0:
            _say_nothing(experts, out, column, rows, TOPK, OUTPUTS, BLOCK, COLUMNS, WARPS)
    expert = gl.load(experts + lead) if BY_ENTRY else lead
    entry = _entries(experts, expert, rows, TOPK, COLUMNS, TOKENS)
    foremost = gl.min(gl.where(entry >= 0, entry, NONE), axis=0)
    live = foremost == lead if BY_ENTRY else foremost != NONE
    if live:
        token = gl.minimum(gl.arange(0, COLUMNS, TOKENS), rows - 1) if GATE else gl.maximum(entry, 0)
        total = _products(
            x, spread(token, 3, 4), codes, scales, expert, column,
            INPUTS, OUTPUTS, HALVES, TILES, COLUMNS, WARPS, DEPTH, PDL, FORMAT,
        )  # fmt: skip
        found, n = _result(
            total, biases, expert, column, OUTPUTS, GATE, BIAS, ALPHA, LIMIT, BLOCK, COLUMNS, x.dtype.element_ty
        )
        PLACES: gl.constexpr = along(found.type.layout, 1, 2)
        again = _entries(experts, expert, rows, TOPK, COLUMNS, PLACES)
        there = gl.expand_dims(again >= 0, 0) & (n < OUTPUTS)
        place = again
        if not GATE:
            found = found * gl.expand_dims(gl.load(weights + again, mask=again >= 0, other=0.0), 0)
            place = again % TOPK * rows + gl.arange(0, COLUMNS, PLACES)
        gl.store(out + gl.expand_dims(place.to(gl.int64) * OUTPUTS, 0) + n, found.to(out.dtype.element_ty), mask=there)


@gluon.jit(do_not_specialize=["rows", "entries"])
def _sorted(
    x, codes, scales, ids, ends, owners, experts, weights, biases, out, rows, entries,
    EXPERTS: gl.constexpr, TOPK: gl.constexpr, INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, GATE: gl.constexpr, PARTS: gl.constexpr,
    BIAS: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, TILES: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr,
    DEPTH: gl.constexpr, PDL: gl.constexpr, FORMAT: gl.constexpr,
):  # fmt: skip
    """A program has a tile of COLUMNS rows. gate: x is in the order of tokens. PARTS: out [TOPK, rows, OUTPUTS], with zeros for the
    entries of experts that go nowhere."""
    HALVES: gl.constexpr = 2 if GATE else 1
    BLOCK: gl.constexpr = 16 * TILES // HALVES
    TOKENS: gl.constexpr = along(layout_of_inputs(COLUMNS, WARPS), 3, 4)
    tile, column = gl.program_id(0), gl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if PARTS:
        FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        flat_n = column * BLOCK + gl.arange(0, BLOCK, FLAT)
        for nth in range(tile, entries, gl.num_programs(0)):
            if gl.load(experts + nth) < 0:
                to = out + (nth % TOPK * rows + nth // TOPK).to(gl.int64) * OUTPUTS
                gl.store(
                    to + flat_n, gl.zeros([BLOCK], gl.float32, FLAT).to(out.dtype.element_ty), mask=flat_n < OUTPUTS
                )
    if tile < gl.load(ends + (EXPERTS - 1)):
        expert = gl.load(owners + tile) % MARK
        row = tile * COLUMNS + gl.arange(0, COLUMNS, TOKENS)
        token = gl.maximum(gl.load(ids + row), 0) // TOPK if GATE else row
        total = _products(
            x, spread(token, 3, 4), codes, scales, expert, column,
            INPUTS, OUTPUTS, HALVES, TILES, COLUMNS, WARPS, DEPTH, PDL, FORMAT,
        )  # fmt: skip
        found, n = _result(
            total, biases, expert, column, OUTPUTS, GATE, BIAS, ALPHA, LIMIT, BLOCK, COLUMNS, x.dtype.element_ty
        )
        PLACES: gl.constexpr = along(found.type.layout, 1, 2)
        place = tile * COLUMNS + gl.arange(0, COLUMNS, PLACES)
        stays = place >= 0
        if GATE or PARTS:
            again = gl.load(ids + place)
            stays = again >= 0
        if PARTS:
            found = found * gl.expand_dims(gl.load(weights + again, mask=stays, other=0.0), 0)
            place = gl.where(stays, again % TOPK * rows + again // TOPK, 0)
        there = gl.expand_dims(stays, 0) & (n < OUTPUTS)
        gl.store(out + gl.expand_dims(place.to(gl.int64) * OUTPUTS, 0) + n, found.to(out.dtype.element_ty), mask=there)


def few(
    x: Tensor, w: ExpertWeight, experts: Tensor, weights: Tensor | None, out: Tensor, shape: DirectShape, epilogue: Epilogue = PLAIN
) -> Tensor:  # fmt: skip
    """See `meshlm.kernels.packed_experts.kernel.few`: of up to DIRECT_ROWS rows."""
    (rows, num_topk), num_experts, gate = experts.shape, w.codes.shape[0], weights is None
    assert rows <= DIRECT_ROWS
    outputs = w.outputs // 2 if gate else w.outputs
    by_entry = experts.numel() <= num_experts
    block = 16 * shape.tiles // (2 if gate else 1)
    _few[(triton.cdiv(outputs, block), experts.numel() if by_entry else num_experts)](
        x, w.codes.view(torch.int32), w.scales.view(torch.int32), experts, x if weights is None else weights,
        x if epilogue.bias is None else epilogue.bias, out, rows, TOPK=num_topk, INPUTS=w.inputs, OUTPUTS=outputs, GATE=gate,
        BY_ENTRY=by_entry, **_options(shape, x, w, epilogue, max(8, triton.next_power_of_2(rows))),
    )  # fmt: skip
    return out


def sorted_rows(
    x: Tensor, w: ExpertWeight, out: Tensor, shape: DirectShape, block_m: int, rows: Rows, *, gate: bool = False,
    parts: Parts | None = None, epilogue: Epilogue = PLAIN,
) -> Tensor:  # fmt: skip
    """See `meshlm.kernels.packed_experts.kernel.sorted_rows`: in tiles of block_m rows, for which they were sorted."""
    num_experts = w.codes.shape[0]
    outputs = w.outputs // 2 if gate else w.outputs
    most, block = most_tiles(rows.entries, num_experts, block_m), 16 * shape.tiles // (2 if gate else 1)
    _sorted[(max(1, most), triton.cdiv(outputs, block))](
        x, w.codes.view(torch.int32), w.scales.view(torch.int32), rows.ids, rows.ends, rows.owners,
        rows.ids if parts is None else parts.experts, x if parts is None else parts.weights,
        x if epilogue.bias is None else epilogue.bias, out, out.shape[-2], 0 if parts is None else parts.experts.numel(),
        EXPERTS=num_experts, TOPK=rows.num_topk, INPUTS=w.inputs, OUTPUTS=outputs, GATE=gate, PARTS=parts is not None,
        **_options(shape, x, w, epilogue, block_m),
    )  # fmt: skip
    return out


def _format(w: ExpertWeight) -> tuple[Any, ...]:
    """The constants that `_products` is compiled for: see its first lines. A chunk of MXFP4 has one word with its scales."""
    half = gl.float16 if w.scales.dtype == torch.float16 else gl.bfloat16
    if w.format.values == "mxfp4":
        return True, CHUNK, chunks_of(w.inputs), False, half
    return False, w.format.group, w.groups, w.format.values == "minima", half


def _options(shape: DirectShape, x: Tensor, w: ExpertWeight, epilogue: Epilogue, columns: int) -> dict[str, Any]:
    return {
        "BIAS": epilogue.bias is not None, "ALPHA": epilogue.alpha, "LIMIT": epilogue.limit, "TILES": shape.tiles, "COLUMNS": columns,
        "WARPS": shape.warps, "DEPTH": shape.depth, "FORMAT": _format(w), "num_warps": shape.warps, **pdl.options(x),
    }  # fmt: skip
