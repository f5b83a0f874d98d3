"""Tiles of a weight, and their products with one row (kernel.py)."""

import triton
import triton.language as tl

ROW = tl.constexpr(-1)  # a group that is the whole row


@triton.jit
def load(weight, n, k, real, K: tl.constexpr, WHOLE: tl.constexpr):
    at = weight + n[:, None].to(tl.int64) * K + k[None, :]
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=real[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _of_groups(
    w, h, scales, n, real,
    START: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """w [BLOCK_N, BLOCK_K], whose inputs begin at START, times h, float32 [BLOCK_N]. GROUP: inputs that share one of w's scales."""
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    nth = START // GROUP + tl.arange(0, BLOCK_K // GROUP)
    inside = real[:, None] & (nth < groups)[None, :]
    found = tl.load(scales + n[:, None] * groups + nth[None, :], mask=inside, other=0.0)
    product = tl.reshape(w.to(tl.float32) * h[None, :], (BLOCK_N, BLOCK_K // GROUP, GROUP))
    return tl.sum(tl.sum(product, axis=2) * found, axis=1)


@triton.jit
def _folded(w, h, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FOLD: tl.constexpr):
    """Parts of the sums of w [BLOCK_N, BLOCK_K] times h, float32 [BLOCK_N, FOLD]: each thread adds up what it holds itself."""
    product = w.to(tl.float32) * h[None, :]
    return product if BLOCK_K == FOLD else tl.sum(tl.reshape(product, (BLOCK_N, BLOCK_K // FOLD, FOLD)), axis=1)


@triton.jit
def times_row(
    w, w_rest, h, rest, scales, n, real,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, REST: tl.constexpr, FOLD: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Of both parts, or of the one that there is, float32 [BLOCK_N]. FOLD: numbers that the threads of a program load at once."""
    if GROUP > 0:
        result = _of_groups(w, h, scales, n, real, 0, K, BLOCK_N, BLOCK_K, GROUP)
        if REST:
            result += _of_groups(w_rest, rest, scales, n, real, BLOCK_K, K, BLOCK_N, REST, GROUP)
    elif REST:
        both = _folded(w, h, BLOCK_N, BLOCK_K, FOLD) + _folded(w_rest, rest, BLOCK_N, REST, FOLD)
        result = tl.sum(both, axis=1)
    else:
        result = tl.sum(w.to(tl.float32) * h[None, :], axis=1)
    if GROUP == ROW:
        result *= tl.load(scales + n, mask=real, other=0.0)
    return result
