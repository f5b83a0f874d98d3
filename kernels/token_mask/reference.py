"""The reference of token_mask/kernel.py, in plain Python."""

import torch
from torch import Tensor


def token_mask(logits: Tensor, lines: list[int], words: list[list[int]]) -> Tensor:
    """A copy of logits [l, vocab]; lines: which of words is theirs, -1 for none."""
    out = logits.clone()
    for line, mine in zip(out, lines, strict=True):
        for token in range(out.shape[1]) if mine >= 0 else ():
            if not (words[mine][token // 32] >> (token % 32)) & 1:
                line[token] = -torch.inf
    return out
