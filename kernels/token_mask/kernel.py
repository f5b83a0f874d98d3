"""Masks of grammars on logits: a token whose bit is not set may not come.

    x = -inf    where bit (token % 32) of words[lines[line], token / 32] is 0, for lines[line] >= 0

Lines without a mask, and logits of tokens that may come, are neither read nor written. One program for each BLOCK tokens of a line.
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
    if mine >= 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        word = tl.load(words + mine * words_stride + (token >> 5), mask=inside, other=-1)
        banned = ((word >> (token & 31)) & 1) == 0
        nothing = tl.full((BLOCK,), float("-inf"), tl.float32).to(logits.dtype.element_ty)
        tl.store(logits + line * stride + token, nothing, mask=inside & banned)


def token_mask(logits: Tensor, lines: Tensor, words: Tensor) -> None:
    """logits [l, vocab] change in place; lines int32 [l]: which of words int32 [m, at least vocab / 32] is theirs, -1 for none."""
    count, vocab = logits.shape
    grid = (count, triton.cdiv(vocab, BLOCK))
    _token_mask[grid](logits, logits.stride(0), vocab, lines, words, words.stride(0), BLOCK=BLOCK, num_warps=8)


def workspace(rows: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """lines and words for steps of up to so many lines, none of which has a mask."""
    lines = torch.full((rows,), -1, dtype=torch.int32, device=device)
    return lines, torch.zeros(rows, triton.cdiv(vocab, 32), dtype=torch.int32, device=device)
