"""What penalties/kernel.py computes, in plain Python and float32."""

from collections import Counter

import torch
from torch import Tensor


def penalise(
    logits: Tensor,
    prompts: list[list[int]],
    outputs: list[list[int]],
    repetition: list[float],
    presence: list[float],
    frequency: list[float],
) -> Tensor:
    """A copy of logits [l, vocab]; everything else by line."""
    out = logits.clone()
    for line, prompt, output, factor, once, each in zip(
        out, prompts, outputs, repetition, presence, frequency, strict=True
    ):
        said = Counter(output)
        for token in {*prompt, *output}:
            x = line[token].float()
            x = x / factor if x > 0 else x * factor
            x = x - (torch.tensor(each) * said[token] + (once if said[token] else 0.0)).to(x.device)
            line[token] = x.to(line.dtype)
    return out
