"""A product of up to 16 rows with a weight of 4 bits (packed_gemm/reference.py), on tensor cores:  out = x W^T

Every thread loads the words that its own place in a tile of the tensor cores asks for, so that nothing moves between threads, as it
does in kernels/packed_gemm. A word becomes four operands by a shift and one bit operation each: its nibbles j and j + 4, or-ed into
the mantissas of two numbers, which are 128 (bfloat16) or 1024 (float16) too large. These are of inputs 128 apart, which may have
scales of their own. So a row of x is two columns: one has the inputs of the lower nibbles and zeros between them, the other those
of the upper ones. What is too large is taken off each group's sum by the sum of its inputs, which tensor cores find too, as a
product with ones:

    sum_k (base + code_k) x_k - (base + zero) sum_k x_k = sum_k (code_k - zero) x_k               then times the scale

The warps of a program share its outputs and have chunks of their own; they add up at the end, in a fixed order. What a chunk takes of
the weight, scales and zero points too, is prefetched DEPTH turns ahead, the first while the kernel before this one still runs. In
Triton's Gluon dialect, for GPUs of compute capability 8.0 and later. Used where the tuner has measured that it is faster.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from meshlm.kernels import pdl
from meshlm.kernels.packed_few.layouts import bits, empty_tuple, pin_loads, range_of
from meshlm.kernels.packed_few.plan import MOST_ROWS, Shape
from meshlm.kernels.packed_gemm.arguments import constants, tensors
from meshlm.kernels.packed_gemm.reference import PackedWeight

# base + the codes that are in bits 0 to 3 and 16 to 19
_BFLOAT16 = gl.constexpr("lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;")
_FLOAT16 = gl.constexpr("lop3.b32 $0, $1, 0x000F000F, 0x64006400, 0xEA;")


@gluon.constexpr_function
def _layout_of_words(TILES: int, WARPS: int) -> gl.DistributedLinearLayout:
    """[WARPS, 16 * TILES outputs, 4, 8 words]: four threads have a line of 128 bytes, with their words side by side."""
    registers = [*bits(3, 4, 1, 8), *bits(1, 4, 8, 16 * TILES)]
    lanes = [*bits(2, 4, 1, 4), *bits(1, 4, 1, 8)]
    return gl.DistributedLinearLayout(registers, lanes, bits(0, 4, 1, WARPS), [], [WARPS, 16 * TILES, 4, 8])


@gluon.constexpr_function
def _layout_of_inputs(COLUMNS: int, WARPS: int) -> gl.DistributedLinearLayout:
    """[WARPS, 4, 8 inputs, 2 halves, COLUMNS]."""
    registers = [*bits(2, 5, 1, 8), *bits(3, 5, 1, 2), *bits(4, 5, 8, COLUMNS)]
    lanes = [*bits(1, 5, 1, 4), *bits(4, 5, 1, 8)]
    return gl.DistributedLinearLayout(registers, lanes, bits(0, 5, 1, WARPS), [], [WARPS, 4, 8, 2, COLUMNS])


@gluon.jit
def _operand(
    words, J: gl.constexpr, dtype: gl.constexpr, LAYOUT: gl.constexpr, OUTPUTS: gl.constexpr, WARPS: gl.constexpr
):
    """base + the codes of planes J and J + 4, [WARPS, OUTPUTS, 64], without a move."""
    asm: gl.constexpr = _BFLOAT16 if dtype == gl.bfloat16 else _FLOAT16
    both = gl.inline_asm_elementwise(asm, "=r,r", [words >> (4 * J)], dtype=gl.int32, is_pure=True, pack=1)
    low = both.to(gl.int16).to(dtype, bitcast=True)
    high = (both >> 16).to(gl.int16).to(dtype, bitcast=True)
    pairs = gl.permute(gl.join(low, high), [0, 1, 3, 2, 4])
    return gl.convert_layout(gl.reshape(pairs, [WARPS, OUTPUTS, 64]), LAYOUT, assert_trivial=True)


@gluon.jit
def _inputs(loaded, LAYOUT: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr):
    """The inputs of two planes, [WARPS, 64, COLUMNS], without a move."""
    found = gl.permute(loaded, [0, 2, 1, 3, 4])
    return gl.convert_layout(gl.reshape(found, [WARPS, 64, COLUMNS]), LAYOUT, assert_trivial=True)


@gluon.jit
def _load_inputs(x_at, place, real, chunk, J: gl.constexpr, INPUTS: gl.constexpr, WHOLE: gl.constexpr):
    """What planes J and J + 4 are multiplied by."""
    here = real
    if not WHOLE:
        here = real & (chunk * 256 + J * 32 + place < INPUTS)
    return gl.load(x_at + chunk * 256 + J * 32, mask=here, other=0.0)


@gluon.jit
def _of_group(at, first, n, INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, GROUP: gl.constexpr):
    """What the groups of the inputs `first` have; behind the last input what the last group has."""
    return gl.load(at + gl.minimum(first, INPUTS - 1) // GROUP * OUTPUTS + n)


@gluon.jit
def _load_weights(
    line, real, scales, offsets, group_at, n, chunk,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, GROUP: gl.constexpr, SPAN: gl.constexpr, OFFSETS: gl.constexpr,
):  # fmt: skip
    """What is loaded of the weight for the warps' chunks from `chunk` on: words, then of each span its scales and offsets."""
    found = empty_tuple() + (gl.load(line + chunk * 32, mask=real, other=0),)
    for span in gl.static_range(4 // SPAN):
        at = chunk * 256 + group_at + span * SPAN * 32
        found = found + (_of_group(scales, at, n, INPUTS, OUTPUTS, GROUP),)
        if OFFSETS:
            found = found + (_of_group(offsets, at, n, INPUTS, OUTPUTS, GROUP),)
    return found


@gluon.jit
def _accumulate(
    total, found, ones, x_at, place, real, chunk,
    INPUTS: gl.constexpr, ZERO: gl.constexpr, ZEROS: gl.constexpr, MINIMA: gl.constexpr, WHOLE: gl.constexpr, SPAN: gl.constexpr,
    BLOCK: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """total and the products of the chunks from `chunk` on, of which `found` was loaded. WHOLE: all of x is there."""
    BASE: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    RAISED: gl.constexpr = 0x43000000 if dtype == gl.bfloat16 else 0x44800000  # BASE in float32, and where its ones are
    MANTISSA: gl.constexpr = 16 if dtype == gl.bfloat16 else 13
    EACH: gl.constexpr = 2 if ZEROS or MINIMA else 1
    SUMS: gl.constexpr = total.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    EARLY: gl.constexpr = COLUMNS == 8  # there is room in registers for all inputs
    APART: gl.constexpr = EARLY and SPAN > 1
    inputs = empty_tuple()
    for j in gl.static_range(4 if EARLY else 0):
        inputs = inputs + (_load_inputs(x_at, place, real, chunk, j, INPUTS, WHOLE),)
    if PDL and EARLY:
        pin_loads(WARPS)
    for span in gl.static_range(4 // SPAN):
        scale = found[1 + span * EACH]
        off = BASE + ZERO
        if ZEROS:
            off = ((found[2 + span * EACH].to(gl.int32) << MANTISSA) | RAISED).to(gl.float32, bitcast=True)
        products = gl.zeros([WARPS, BLOCK, COLUMNS], gl.float32, SUMS)
        sums = gl.zeros([WARPS, 16, COLUMNS], gl.float32, SUMS)
        others, sums_of_others = products, sums  # of every other plane: tensor cores wait for the last product of a sum
        for j in gl.static_range(span * SPAN, (span + 1) * SPAN):
            loaded = inputs[j] if EARLY else _load_inputs(x_at, place, real, chunk, j, INPUTS, WHOLE)
            y = _inputs(loaded, RIGHT, COLUMNS, WARPS)
            codes = _operand(found[0], j, dtype, LEFT, BLOCK, WARPS)
            if APART and j % 2 == 1:
                others = mma_v2(codes, y, others)
                sums_of_others = mma_v2(ones, y, sums_of_others)
            else:
                products = mma_v2(codes, y, products)
                sums = mma_v2(ones, y, sums)
        if APART:
            products += others
            sums += sums_of_others
        sums = gl.reshape(sums, [WARPS, 1, 16, COLUMNS]).broadcast_to([WARPS, BLOCK // 16, 16, COLUMNS])
        sums = gl.convert_layout(gl.reshape(sums, [WARPS, BLOCK, COLUMNS]), SUMS, assert_trivial=True)
        if MINIMA:
            total += (products - BASE * sums) * scale.to(gl.float32) + found[2 + span * EACH].to(gl.float32) * sums
        else:
            total += (products - off * sums) * scale.to(gl.float32)
    return total


@gluon.jit
def _ask_for(row, part, TURNS: gl.constexpr, WARPS: gl.constexpr, CHUNKS: gl.constexpr):
    """All lines of the program are brought to the L2 cache."""
    for turn in gl.static_range(TURNS):
        asked = row + gl.minimum(turn * WARPS + part, CHUNKS - 1) * 32
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [asked], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit(do_not_specialize=["rows"])
def _packed_few(
    x, low, scales, zeros, minima, bias, out, rows,
    INPUTS: gl.constexpr, OUTPUTS: gl.constexpr, CHUNKS: gl.constexpr, GROUP: gl.constexpr, ZERO: gl.constexpr, ZEROS: gl.constexpr,
    MINIMA: gl.constexpr, BIAS: gl.constexpr, TILES: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, DEPTH: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """A program has 16 * TILES outputs. COLUMNS: two for each row. DEPTH: turns of the weight that are under way at once."""
    dtype: gl.constexpr = x.dtype.element_ty
    BLOCK: gl.constexpr = 16 * TILES
    TURNS: gl.constexpr = (CHUNKS + WARPS - 1) // WARPS
    SPAN: gl.constexpr = min(GROUP, 128) // 32  # planes that share a scale
    OFFSETS: gl.constexpr = ZEROS or MINIMA
    WHOLE: gl.constexpr = INPUTS % 256 == 0 and CHUNKS % (WARPS * DEPTH) == 0
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    WORDS: gl.constexpr = _layout_of_words(TILES, WARPS)
    PLACES: gl.constexpr = _layout_of_inputs(COLUMNS, WARPS)

    first = gl.program_id(0) * BLOCK
    part = range_of(WARPS, WORDS, 0, 4)
    row = low + gl.minimum(first + range_of(BLOCK, WORDS, 1, 4), OUTPUTS - 1).to(gl.int64) * (CHUNKS * 32)
    line = row + part * 32 + range_of(4, WORDS, 2, 4) * 8 + range_of(8, WORDS, 3, 4)
    column, half, x_part = range_of(COLUMNS, PLACES, 4, 5), range_of(2, PLACES, 3, 5), range_of(WARPS, PLACES, 0, 5)
    place = x_part * 256 + half * 128 + range_of(4, PLACES, 1, 5) * 8 + range_of(8, PLACES, 2, 5)
    real = (column % 2 == half) & (column // 2 < rows)
    x_at = x + column // 2 * INPUTS + place
    o_part, o_half = range_of(WARPS, SUMS, 0, 3), range_of(COLUMNS, SUMS, 2, 3) % 2
    group_at = o_part * 256 + o_half * 128
    n = gl.minimum(first + range_of(BLOCK, SUMS, 1, 3), OUTPUTS - 1)
    offsets = zeros if ZEROS else minima

    ones = gl.full([WARPS, 16, 64], 1.0, dtype, gl.DotOperandLayout(0, SUMS, 2))
    total = gl.zeros([WARPS, BLOCK, COLUMNS], gl.float32, SUMS)
    prefetched = empty_tuple()
    for turn in gl.static_range(DEPTH):
        within = turn * WARPS + part < CHUNKS
        prefetched = prefetched + (
            _load_weights(
                line, within, scales, offsets, group_at, n, turn * WARPS, INPUTS, OUTPUTS, GROUP, SPAN, OFFSETS
            ),
        )
    if PDL:
        gdc_launch_dependents()
        if DEPTH < TURNS:
            _ask_for(row, part, TURNS, WARPS, CHUNKS)
        gdc_wait()
    if DEPTH < TURNS:
        for begin in range(0, TURNS, DEPTH):
            for turn in gl.static_range(DEPTH):
                chunk = (begin + turn) * WARPS
                later = chunk + DEPTH * WARPS
                within = later + part < CHUNKS
                prefetched = prefetched + (
                    _load_weights(
                        line, within, scales, offsets, group_at, n, later, INPUTS, OUTPUTS, GROUP, SPAN, OFFSETS
                    ),
                )
                total = _accumulate(
                    total, prefetched[0], ones, x_at, place, real, chunk,
                    INPUTS, ZERO, ZEROS, MINIMA, WHOLE, SPAN, BLOCK, COLUMNS, WARPS, PDL, dtype,
                )  # fmt: skip
                prefetched = prefetched[1:]
    else:
        for turn in gl.static_range(TURNS):
            total = _accumulate(
                total, prefetched[turn], ones, x_at, place, real, turn * WARPS,
                INPUTS, ZERO, ZEROS, MINIMA, WHOLE, SPAN, BLOCK, COLUMNS, WARPS, PDL, dtype,
            )  # fmt: skip
    found = gl.sum(gl.sum(gl.reshape(total, [WARPS, BLOCK, COLUMNS // 2, 2]), axis=3), axis=0)
    n = first + gl.arange(0, BLOCK, gl.SliceLayout(1, found.type.layout))
    m = gl.arange(0, COLUMNS // 2, gl.SliceLayout(0, found.type.layout))
    there = (n < OUTPUTS)[:, None] & (m < rows)[None, :]
    if BIAS:
        found += gl.load(bias + n, mask=n < OUTPUTS, other=0.0).to(gl.float32)[:, None]
    gl.store(out + m[None, :] * OUTPUTS + n[:, None], found.to(dtype), mask=there)


def packed_few(x: Tensor, weight: PackedWeight, shape: Shape, bias: Tensor | None = None) -> Tensor:
    """x [m, inputs] in the packed order, m up to MOST_ROWS, of 16 bits -> [m, outputs]. ValueError for more rows."""
    rows = x.shape[0]
    if rows > MOST_ROWS:
        raise ValueError(f"{rows} rows, {MOST_ROWS} at most")
    out = torch.empty(rows, weight.outputs, dtype=x.dtype, device=x.device)
    low, _, scales, zeros, minima, _ = tensors(weight)
    given = {name: value for name, value in constants(weight).items() if name not in ("BITS", "TABLE")}
    _packed_few[(triton.cdiv(weight.outputs, 16 * shape.tiles),)](
        x, low, scales, zeros, minima, x if bias is None else bias, out, rows, **given, BIAS=bias is not None, TILES=shape.tiles,
        COLUMNS=max(8, 2 * triton.next_power_of_2(rows)), WARPS=shape.warps,
        DEPTH=min(shape.depth, triton.cdiv(given["CHUNKS"], shape.warps)), num_warps=shape.warps, **pdl.options(x),
    )  # fmt: skip
    return out
