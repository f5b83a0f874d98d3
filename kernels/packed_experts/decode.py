"""Packed weights of experts (layout.py) in registers: the planes of a chunk, and their values.

Codes of 4 bits become numbers by the bits that they are: or-ed into the mantissa of 2^7 (bfloat16) or 2^10 (float16) they are that much
too large, exactly. A code of MXFP4, moved to exponent and mantissa of a bfloat16, is its value times 2^-126.
"""

import triton
import triton.language as tl

UP = tl.constexpr(2.0**126)

_MXFP4: tl.constexpr = tl.constexpr(
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
_RAISED = """{{
    .reg .b32 t;
    lop3.b32 $0, $4, 0x000F000F, {base}, 0xEA;
    shr.u32 t, $4, 4;
    lop3.b32 $1, t, 0x000F000F, {base}, 0xEA;
    shr.u32 t, $4, 8;
    lop3.b32 $2, t, 0x000F000F, {base}, 0xEA;
    shr.u32 t, $4, 12;
    lop3.b32 $3, t, 0x000F000F, {base}, 0xEA;
    }}"""
_RAISED_BFLOAT16: tl.constexpr = tl.constexpr(_RAISED.format(base="0x43004300"))
_RAISED_FLOAT16: tl.constexpr = tl.constexpr(_RAISED.format(base="0x64006400"))


@triton.jit
def planes_of(words, dtype: tl.constexpr, MXFP4: tl.constexpr):
    """int16 -> the codes of the four planes, two words at a time: of MXFP4 2^-126 times their value, else raised by 128 or 1024."""
    if MXFP4:
        return tl.inline_asm_elementwise(
            _MXFP4, "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
        )
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _RAISED_BFLOAT16, "=r,=r,=r,=r,r", [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            _RAISED_FLOAT16, "=r,=r,=r,=r,r", [words], dtype=(tl.float16,) * 4, is_pure=True, pack=2
        )


@triton.jit
def mxfp4_value(words, scale, P: tl.constexpr, dtype: tl.constexpr):
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
def mxfp4_power(scale, P: tl.constexpr):
    """2 to the scale of plane P, bfloat16."""
    power = (scale >> (8 * P)) & 255
    return tl.where(power == 0, 0x40, power << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def codes_of(words, others, P: tl.constexpr, BITS: tl.constexpr):
    """The codes of plane P, int32 [n, 32]. others: the words of planes 2 and 3 (8 bits), or the bits beyond the fourth."""
    if BITS == 8:
        if P < 2:
            return (words.to(tl.int32) >> (8 * P)) & 255
        return (others.to(tl.int32) >> (8 * P - 16)) & 255
    codes = (words.to(tl.int32) >> (4 * P)) & 15
    if BITS == 6:
        codes |= ((others.to(tl.int32) >> (2 * P)) & 3) << 4
    elif BITS == 5:
        upper = (tl.arange(0, 32) // 16 * 4)[None, :]
        codes |= ((others.to(tl.int32) >> (P + upper)) & 1) << 4
    return codes


@triton.jit
def scales_of(at, HALF: tl.constexpr):
    """A scale and what stands beside it, float32. at: pointers to both together, int32 of 16-bit floats HALF, or int64 of float32."""
    both = tl.load(at)
    if tl.float32 == HALF:
        return both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    scale = both.to(tl.int16).to(HALF, bitcast=True).to(tl.float32)
    return scale, (both >> 16).to(tl.int16).to(HALF, bitcast=True).to(tl.float32)
