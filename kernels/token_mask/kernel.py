"""Masks of grammars on logits: a token whose bit is not set may not come.

    x = -inf    where bit (token % 32) of words[lines[line], token / 32] is 0, for lines[line] >= 0

Lines without a mask are neither read nor written. One program for each BLOCK tokens of a line.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


@triton.jit
def _token_mask(logits, stride, vocab, lines, words, words_stride, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    mine = tl.load(lines + line).to(tl.int64)
    # all logits are read and written, since stores of whole vectors are four times as fast as those of some elements
    if mine >= 0:
        nth = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        bit = tl.arange(0, 32)
        token = nth[:, None] * 32 + bit[None, :]
        inside = token < vocab
        word = tl.load(words + mine * words_stride + nth, mask=nth * 32 < vocab, other=-1)
        allowed = ((word[:, None] >> bit[None, :]) & 1) != 0
        at = logits + line * stride + token
        x = tl.load(at, mask=inside, other=0.0)
        tl.store(at, tl.where(allowed, x, float("-inf")), mask=inside)


def token_mask(logits: Tensor, lines: Tensor, words: Tensor) -> None:
    """logits [l, vocab] change in place; lines int32 [l]: which of words int32 [m, at least vocab / 32] is theirs, -1 for none."""
    count, vocab = logits.shape
    grid = (count, triton.cdiv(vocab, BLOCK))
    _token_mask[grid](logits, logits.stride(0), vocab, lines, words, words.stride(0), BLOCK=BLOCK, num_warps=8)


def workspace(rows: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """lines and words for steps of up to so many lines, none of which has a mask."""
    lines = torch.full((rows,), -1, dtype=torch.int32, device=device)
    return lines, torch.zeros(rows, triton.cdiv(vocab, 32), dtype=torch.int32, device=device)
