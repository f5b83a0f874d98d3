"""The rounding of one row to 8-bit floats inside the kernel that multiplies it (kernel.py), as kernels/quantise_fp8 does it.

A row may come in parts: `k` says which inputs a part holds, `END` where they end; those from K on are none.
"""

import triton
import triton.language as tl

from meshlm.kernels.fp8 import within


@triton.jit
def _distinct(h, k, K: tl.constexpr, END: tl.constexpr):
    """ptxas 12.8 spoils roundings of numbers that it knows to be the same, as zeros behind the last input are."""
    return tl.where(k < K, h, k.to(tl.float32) * 1e-30) if K < END else h


@triton.jit
def in_model_dtype(h, k, dtype, K: tl.constexpr, END: tl.constexpr, PAIRS: tl.constexpr):
    """y rounded to the model's dtype, float32.

    PAIRS: bfloat16, which the GPU rounds to two numbers at a time; Triton has it do so one by one, at an eighth of the speed."""
    h = _distinct(h, k, K, END)
    if PAIRS:
        h = tl.inline_asm_elementwise(
            "{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000; }",
            "=f,=f,f,f", [h], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        h = h.to(dtype).to(tl.float32)
    return h


@triton.jit
def scale_of(largest):
    """What a row divides by that finds its own scale: then nothing is above 448 times that."""
    return tl.maximum(tl.div_rn(largest, 448.0), 1e-12)


@triton.jit
def codes_of(h, scale):
    """What 8-bit floats leave of y / scale."""
    inverse = tl.div_rn(1.0, scale)
    y = h * inverse
    y = tl.fma(tl.fma(-y, scale, h), inverse, y)  # y / scale as it is rounded: many lie right between two codes
    return y.to(tl.float8e4nv).to(tl.float32)


@triton.jit
def in_8_bits(
    h, k, given, dtype,
    K: tl.constexpr, END: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """What 8-bit floats leave of y, which is rounded to the model's dtype before. GROUP: inputs that share a scale."""
    h = _distinct(h, k, K, END).to(dtype).to(tl.float32)
    if STATIC:
        scale = tl.load(given)
        left = within(h, scale, 448.0).to(tl.float8e4nv).to(tl.float32) * scale
    else:
        parted = tl.reshape(h, (BLOCK_K // GROUP, GROUP))
        scales = tl.maximum(tl.max(tl.abs(parted), axis=1) / 448.0, 1e-12)[:, None]
        left = tl.reshape(within(parted, scales, 448.0).to(tl.float8e4nv).to(tl.float32) * scales, (BLOCK_K,))
    return left
