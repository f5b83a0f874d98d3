"""What kernels with recurrent states share: the requests of a step, and the pieces in which they compute its prompts.

A request's tokens, its position and its row of the block tables are the step's columns (kernels/attention/kernel.py: Columns). A
*piece* is a run of a prompt's tokens within one block, so that a state which is left behind a block's end stands behind a piece.

States lie in two halves (workers/kv/layout.py): line `l` of `half` lines each is place l % half of half l // half.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 128  # tokens, at most


class Pieces(NamedTuple):
    """The prompts of a step, on the device."""

    pieces: Tensor  # int32 [m, 3]: request, its first token counted among the request's, number of tokens
    prompts: Tensor  # int32 [p, 2]: first piece, number of pieces

    @classmethod
    def of(
        cls, prompts: list[tuple[int, int, int]], block_size: int, device: torch.device, most: int = PIECE
    ) -> "Pieces":
        """prompts: request, position of its first token, number of tokens."""
        pieces: list[tuple[int, int, int]] = []
        ranges = []
        for request, start, count in prompts:
            first, at = len(pieces), start
            while at < start + count:
                end = min(start + count, (at // block_size + 1) * block_size, at + most)
                pieces.append((request, at - start, end - at))
                at = end
            ranges.append((first, len(pieces) - first))
        both = torch.tensor([number for line in (*pieces, *ranges) for number in line], dtype=torch.int32)
        both = both.to(device, non_blocking=True)
        return cls(both[: 3 * len(pieces)].view(-1, 3), both[3 * len(pieces) :].view(-1, 2))


@triton.jit
def request_of(request, rows, starts, ends, tables, stride):
    """The first token and the number of tokens of a request, its position, and its block table."""
    before = tl.load(ends + request - 1, mask=request > 0, other=0)
    count = tl.load(ends + request) - before
    table = tables + tl.load(rows + request).to(tl.int64) * stride
    return before.to(tl.int64), count, tl.load(starts + request), table


@triton.jit
def piece_of(pieces, ends, piece):
    """The first token of a piece among the step's, and its number of tokens."""
    request, first = tl.load(pieces + 3 * piece), tl.load(pieces + 3 * piece + 1)
    token = (tl.load(ends + request - 1, mask=request > 0, other=0) + first).to(tl.int64)
    return token, tl.load(pieces + 3 * piece + 2)


@triton.jit
def left_in(table, start, end, count, PAGE: tl.constexpr):
    """The page that the state behind `end` of a request's `count` tokens goes to; -1: it is not left."""
    at = start + end
    row = (at - 1) // PAGE
    page = tl.load(table + row)
    after = tl.load(table + row + 1, mask=end < count, other=-1)
    left = (end == count) | ((at % PAGE == 0) & (after != page))
    return tl.where(left, page, -1).to(tl.int64)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as torch has it: beyond 20 it is x."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def time_step(dt, bias, low, high):
    """The step of Mamba-2 (kernels/ssd/reference.py: TimeSteps)."""
    return tl.minimum(tl.maximum(softplus(dt.to(tl.float32) + bias), low), high)
