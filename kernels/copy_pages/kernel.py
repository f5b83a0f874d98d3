"""Lines of many columns from one memory to another (see reference.py for the formula), in one kernel.

A column is known by its address alone, so it may lie in any memory that this GPU reaches, that of a peer too. All columns of a side are
equally far from line to line.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # words of 8 bytes that a program copies at once: 16 KiB
VECTOR = 16  # bytes that a thread reads at once, at most


class Columns(NamedTuple):
    """One side. addresses: int64 [columns], on the GPU. align: a power of two that divides all addresses and the stride."""

    addresses: Tensor
    stride: int  # bytes from line to line
    align: int


def columns_at(addresses: Sequence[int], stride: int, device: torch.device) -> Columns:
    """Columns at these addresses. The copy of the addresses to the GPU belongs to the current stream."""
    return Columns(torch.tensor(addresses, device=device), stride, math.gcd(VECTOR, stride, *addresses))


@triton.jit
def _copy_pages(
    sources, source_lines, source_stride, targets, target_lines, target_stride,
    WORDS: tl.constexpr, WORD: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column, nth = tl.program_id(0), tl.program_id(1)
    source = tl.load(sources + column) + tl.load(source_lines + nth).to(tl.int64) * source_stride
    target = tl.load(targets + column) + tl.load(target_lines + nth).to(tl.int64) * target_stride
    from_ = tl.multiple_of(source.to(tl.pointer_type(WORD)), ALIGN)
    to = tl.multiple_of(target.to(tl.pointer_type(WORD)), ALIGN)
    for begin in range(0, WORDS, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(from_ + at, mask=at < WORDS), mask=at < WORDS)


def copy_pages(
    source: Columns, source_lines: Tensor, target: Columns, target_lines: Tensor, count: int, width: int
) -> None:
    """The first `count` lines of both sides, int32 [count or more]; `width` bytes of each column."""
    align = math.gcd(source.align, target.align, width)
    size = min(align, 8)
    word = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}[size]
    _copy_pages[(len(source.addresses), count)](
        source.addresses, source_lines, source.stride, target.addresses, target_lines, target.stride,
        WORDS=width // size, WORD=word, ALIGN=align, BLOCK=min(BLOCK, triton.next_power_of_2(width // size)),
        num_warps=4,
    )  # fmt: skip
