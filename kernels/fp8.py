"""Conversion to 8-bit floats inside kernels that write them; kernels/float8.py says what must come out.

Kernels that read them multiply scores and results by the scales.
"""

import triton
import triton.language as tl


@triton.jit
def within(x, scale, LARGEST: tl.constexpr):
    """x / scale in the range of the type whose largest number this is, float32: conversion alone may not saturate."""
    return tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST)
