"""Masks of grammars on logits, by plain torch on any device. On a GPU with Triton a kernel does it (kernels/token_mask)."""

import torch
from torch import Tensor

from meshlm.workers.output.grammars import TokenMask
from meshlm.workers.output.sampler import put


def apply(logits: Tensor, mask: TokenMask) -> None:
    """Tokens that may not come get -inf. logits [l, vocab] are changed in place."""
    lines, banned = put(mask.lines, logits.device), put(~mask.allowed(logits.shape[1]), logits.device)
    logits[lines] = logits[lines].masked_fill_(banned, -torch.inf)
