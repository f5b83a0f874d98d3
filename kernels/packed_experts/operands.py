"""Operands of tensor cores out of words of codes and out of rows, without moves between threads.

A word of 32 bits holds the codes of two neighbouring inputs in each of the four planes of a chunk (layout.py). A plane's two make an
operand by a shift and one operation of bits. Integers are or-ed into the mantissas of two numbers, which are 128 (bfloat16) or 1024
(float16) too large. Codes of MXFP4 become bfloat16 of 2^-126 times their value, exactly, and one multiplication, by 2^126 times the
group's scale, makes these the weights, for any scale up to 2 (`plan.takes`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from meshlm.kernels.packed_few.layouts import bits, empty_tuple

PAIR = gl.constexpr(2)  # chunks that a warp asks for at once

# A plane's codes of two inputs, as bfloat16 of 2^-126 times their value, times the group's factor: one half of $2, in both halves.
_HEAD = """{{
    .reg .b32 t, s, none, both;
    .reg .b16 low, high;
    mov.b32 none, 0x80008000;
    mov.b32 {{low, high}}, $2;
    mov.b32 both, {{{half}, {half}}};
    """
_TAIL = """
    fma.rn.bf16x2 $0, t, both, none;
    }"""
_CODES = (
    "and.b32 t, $1, 0x81C081C0;",
    "shl.b32 t, $1, 3; and.b32 t, t, 0x81C081C0;",
    "shl.b32 t, $1, 6; and.b32 t, t, 0x81C081C0;",
    """shr.u32 t, $1, 6; shr.u32 s, $1, 4; and.b32 t, t, 0x01800180; lop3.b32 t, s, 0x00400040, t, 0xEA;
    shl.b32 s, $1, 4; lop3.b32 t, s, 0x80008000, t, 0xEA;""",
)
_PLANE_0, _PLANE_1, _PLANE_2, _PLANE_3 = (
    gl.constexpr(_HEAD.format(half=half) + codes + _TAIL)
    for codes, half in zip(_CODES, ("low", "low", "high", "high"), strict=True)
)
_RAISED_BFLOAT16 = gl.constexpr("lop3.b32 $0, $1, 0x000F000F, 0x43004300, 0xEA;")
_RAISED_FLOAT16 = gl.constexpr("lop3.b32 $0, $1, 0x000F000F, 0x64006400, 0xEA;")


@gluon.constexpr_function
def layout_of_words(TILES: int, WARPS: int) -> gl.DistributedLinearLayout:
    """[WARPS, 16 * TILES outputs, 4, 4 words]: four threads have the 64 bytes of a chunk."""
    registers = [*bits(3, 4, 1, 4), *bits(1, 4, 8, 16 * TILES)]
    lanes = [*bits(2, 4, 1, 4), *bits(1, 4, 1, 8)]
    return gl.DistributedLinearLayout(registers, lanes, bits(0, 4, 1, WARPS), [], [WARPS, 16 * TILES, 4, 4])


@gluon.constexpr_function
def layout_of_inputs(COLUMNS: int, WARPS: int) -> gl.DistributedLinearLayout:
    """[WARPS, 4, 8 inputs, COLUMNS]."""
    registers = [*bits(2, 4, 1, 8), *bits(3, 4, 8, COLUMNS)]
    lanes = [*bits(1, 4, 1, 4), *bits(3, 4, 1, 8)]
    return gl.DistributedLinearLayout(registers, lanes, bits(0, 4, 1, WARPS), [], [WARPS, 4, 8, COLUMNS])


@gluon.jit
def mxfp4_operand(words, factors, P: gl.constexpr, LAYOUT: gl.constexpr, LINES: gl.constexpr, WARPS: gl.constexpr):
    """The weights of plane P, [WARPS, LINES, 32], without a move. factors: `factors_of` of that plane, [WARPS, LINES, 1, 1]."""
    plane: gl.constexpr = (_PLANE_0 if P == 0 else _PLANE_1) if P < 2 else (_PLANE_2 if P == 2 else _PLANE_3)
    both = gl.inline_asm_elementwise(plane, "=r,r,r", [words, factors], dtype=gl.int32, is_pure=True, pack=1)
    return _operand(both, gl.bfloat16, LAYOUT, LINES, WARPS)


@gluon.jit
def integer_operand(
    words, P: gl.constexpr, dtype: gl.constexpr, LAYOUT: gl.constexpr, LINES: gl.constexpr, WARPS: gl.constexpr
):
    """The codes of plane P and 128 or 1024, [WARPS, LINES, 32], without a move."""
    plane: gl.constexpr = _RAISED_BFLOAT16 if dtype == gl.bfloat16 else _RAISED_FLOAT16
    both = gl.inline_asm_elementwise(plane, "=r,r", [words >> (4 * P)], dtype=gl.int32, is_pure=True, pack=1)
    return _operand(both, dtype, LAYOUT, LINES, WARPS)


@gluon.jit
def _operand(both, dtype: gl.constexpr, LAYOUT: gl.constexpr, LINES: gl.constexpr, WARPS: gl.constexpr):
    low = both.to(gl.int16).to(dtype, bitcast=True)
    high = (both >> 16).to(gl.int16).to(dtype, bitcast=True)
    pairs = gl.permute(gl.join(low, high), [0, 1, 3, 2, 4])
    return gl.convert_layout(gl.reshape(pairs, [WARPS, LINES, 32]), LAYOUT, assert_trivial=True)


@gluon.jit
def factors_of(scales):
    """2^126 times the scales of planes 0 and 2, and of 1 and 3, as bfloat16 in the halves of a word."""
    scales += 0x7E7E7E7E
    return (scales << 7) & 0x7F807F80, (scales >> 1) & 0x7F807F80


@gluon.jit
def right_operand(loaded, LAYOUT: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr):
    """The inputs of a plane, [WARPS, 32, COLUMNS], without a move."""
    found = gl.reshape(loaded, [WARPS, 4, 4, 2, COLUMNS])
    found = gl.reshape(gl.permute(found, [0, 2, 1, 3, 4]), [WARPS, 32, COLUMNS])
    return gl.convert_layout(found, LAYOUT, assert_trivial=True)


@gluon.jit
def load_inputs(x_at, x_part, inside, chunk, P: gl.constexpr, INPUTS: gl.constexpr, MXFP4: gl.constexpr):
    """What plane P of the warps' chunks from `chunk` on is multiplied by. Behind the last input codes of MXFP4 are zeros, and scales of
    chunks that are not there too: any input will do there."""
    k = chunk * 128 + P * 32 + x_part
    if INPUTS % 128 == 0 or (MXFP4 and INPUTS % 32 == 0):
        return gl.load(x_at + gl.minimum(k, INPUTS - 32) + inside)
    elif MXFP4:
        return gl.load(x_at + gl.minimum(k + inside, INPUTS - 1))
    else:
        return gl.load(x_at + k + inside, mask=k + inside < INPUTS, other=0.0)


@gluon.jit
def load_weights(
    words_at, scales_at, part, o_part, chunk,
    INPUTS: gl.constexpr, CHUNKS: gl.constexpr, GROUPS: gl.constexpr, GROUP: gl.constexpr, SPANS: gl.constexpr,
):  # fmt: skip
    """Of each of a turn's chunks the words, and then the scales of its SPANS groups (of MXFP4 a word for all four)."""
    found = empty_tuple()
    for nth in gl.static_range(PAIR):
        found = found + (gl.load(words_at + (chunk + nth) * 16, mask=chunk + nth + part < CHUNKS, other=0),)
        for span in gl.static_range(SPANS):
            at = (chunk + nth) * SPANS + span
            real = at + o_part * SPANS < CHUNKS * SPANS
            if GROUP > 128:
                at = (at + o_part) * 128 // GROUP
            elif INPUTS % 128 != 0 and SPANS > 1:
                real = at + o_part * SPANS < GROUPS
            found = found + (gl.load(scales_at + at, mask=real, other=0),)
    return found
