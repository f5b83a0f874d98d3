"""The reference of sample/kernel.py, in plain torch and float64."""

import math

import torch
from torch import Tensor

from meshlm.kernels.sample.outcomes import NONE_LEFT, NOT_NUMBERS

MASK = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """Draw `index` of a seed, in [0, 1)."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    z ^= z >> 31
    return (z >> 11) * 2.0**-53


def sample(logits: Tensor, temperatures: list[float], draws: list[float]) -> list[int]:
    """One id, or outcome, for each line."""
    found = []
    for line, temperature, draw in zip(logits, temperatures, draws, strict=True):
        top = float(line.float().max())
        if math.isnan(top) or (top == math.inf and temperature >= 1e-5):
            found.append(NOT_NUMBERS)
            continue
        if top == -math.inf:
            found.append(NONE_LEFT)
            continue
        if temperature < 1e-5:
            found.append(int(line.float().argmax()))
            continue
        upto = (line.double() / temperature).softmax(-1).cumsum(-1)
        target = torch.tensor([draw * float(upto[-1])], dtype=torch.float64, device=line.device)
        found.append(min(int(torch.searchsorted(upto, target, right=True)), len(line) - 1))
    return found
