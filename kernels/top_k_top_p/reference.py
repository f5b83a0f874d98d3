"""The reference of top_k_top_p/kernel.py, in plain torch and float64, by sorting."""

import math

import torch
from torch import Tensor


def top_k_top_p(
    logits: Tensor, temperatures: list[float], min_p: list[float], top_k: list[int], top_p: list[float]
) -> Tensor:
    """A copy of logits [l, vocab], one parameter a line, where excluded tokens are -inf."""
    out = logits.clone()
    vocab = logits.shape[1]
    for line, temperature, least, k, share in zip(out, temperatures, min_p, top_k, top_p, strict=True):
        if temperature < 1e-5:
            continue
        scaled = line.double() / temperature
        if least > 0:
            scaled[scaled < scaled.max() + math.log(least)] = -torch.inf
        if 0 < k < vocab:
            scaled[scaled < scaled.sort(descending=True).values[k - 1]] = -torch.inf
        if share < 1:
            ordered = scaled.sort(descending=True).values
            upto = ordered.softmax(-1).cumsum(-1)
            last = int((upto < share).sum().clamp(max=vocab - 1))
            scaled[scaled < ordered[last]] = -torch.inf
        line[scaled == -torch.inf] = -torch.inf
    return out
