"""The reference of penalties/kernel.py, in plain Python and float32."""

from collections import Counter

import torch
from torch import Tensor


def penalise(
    logits: Tensor, prompts: list[list[int]], outputs: list[list[int]], repetition: list[float], presence: list[float],
    frequency: list[float], edits: list[list[tuple[int, float, int]]],
) -> Tensor:  # fmt: skip
    """A copy of logits [l, vocab]; everything else by line. edits: (id, what is added, before which output index)."""
    out = logits.clone()
    for line, prompt, output, factor, once, each, changes in zip(
        out, prompts, outputs, repetition, presence, frequency, edits, strict=True
    ):
        for token, value, until in changes:
            if len(output) < until:
                line[token] = (line[token].float() + value).to(line.dtype)
        said = Counter(output)
        for token in {*prompt, *output}:
            x = line[token].float()
            x = x / factor if x > 0 else x * factor
            x = x - (torch.tensor(each) * said[token] + (once if said[token] else 0.0)).to(x.device)
            line[token] = x.to(line.dtype)
    return out
