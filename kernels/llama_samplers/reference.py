"""The reference of llama_samplers/kernel.py, in plain torch on any device, a line at a time. Nothing waits for the device."""

from typing import NamedTuple

import torch
from torch import Tensor

XTC_SALT = 0x5A17_C0DE  # the draws of xtc are others than those of the tokens


class Chain(NamedTuple):
    """The parameters of one line."""

    top_n_sigma: float = 0.0  # off: 0
    top_k: int = 0  # off: 0
    typical_p: float = 1.0  # off: 1
    top_p: float = 1.0  # off: 1
    min_p: float = 0.0  # off: 0
    xtc_probability: float = 0.0  # off: 0
    xtc_threshold: float = 0.1  # off above 0.5


def repeat_less(line: Tensor, text: Tensor, breaks: Tensor, dry: tuple[float, float, int, int]) -> None:
    """DRY. line [vocab] changes; text int32 [n]: the tokens that count; breaks bool [n]: which of them are sequence breakers. dry:
    multiplier, base, allowed length, and the length of a repetition that no longer one is worse than."""
    multiplier, base, allowed, longest = dry
    length = len(text)
    if length <= allowed:
        return
    at = torch.arange(length, device=line.device)
    since = length - 1 - torch.where(breaks, at, -1).amax()
    same, repeats = at < length - 1, torch.zeros_like(at)
    for nth in range(min(length - 1, longest)):
        same = same & (at >= nth) & (nth < since) & (text.roll(nth) == text[length - 1 - nth])
        same &= text[length - 1 - nth] >= 0
        repeats += same
    counts = torch.where((repeats >= allowed) & (at < length - 1) & (since >= allowed), repeats + 1, 0)[:-1]
    follows = text[1:].long().clamp(min=0)
    counts = torch.where(text[1:] >= 0, counts, 0)
    most = torch.zeros(len(line), dtype=counts.dtype, device=line.device).scatter_reduce_(0, follows, counts, "amax")
    penalty = multiplier * torch.pow(torch.tensor(base, dtype=torch.float64), (most - 1 - allowed).clamp(min=0))
    line.copy_(torch.where(most > 0, (line.double() - penalty).float().to(line.dtype), line))


def truncate(line: Tensor, chain: Chain, u: float) -> None:
    """The chain. line [vocab] changes: tokens that are left out become -inf. u: the draw of xtc."""
    x = line.double()
    spoilt = x.isnan().any() | (x == torch.inf).any()  # nothing can be drawn of it
    if chain.top_n_sigma > 0:
        there = x > -torch.inf
        number = there.sum()
        mean = torch.where(there, x, 0.0).sum() / number
        std = (torch.where(there, x - mean, 0.0).square().sum() / number).sqrt()
        x = torch.where(x >= x.amax() - chain.top_n_sigma * std, x, -torch.inf)
    if 0 < chain.top_k < len(x):
        x = torch.where(x >= x.topk(chain.top_k).values[-1], x, -torch.inf)
    if chain.typical_p < 1:
        p = x.softmax(0)
        surprise = -p.log()
        entropy = torch.where(p > 0, p * surprise, 0.0).sum()
        distance = torch.where(p > 0, (surprise - entropy).abs(), torch.inf)
        x = torch.where(distance <= _border(distance, p, chain.typical_p, strict=True), x, -torch.inf)
    if chain.top_p < 1:
        x = torch.where(-x <= _border(-x, x.softmax(0), chain.top_p, strict=False), x, -torch.inf)
    if chain.min_p > 0:
        x = torch.where(x >= x.amax() + torch.tensor(chain.min_p).double().log(), x, -torch.inf)
    if chain.xtc_probability > 0 and u <= chain.xtc_probability and chain.xtc_threshold <= 0.5:
        likely = (x > -torch.inf) & (x.softmax(0) >= chain.xtc_threshold)
        least = torch.where(likely, x, torch.inf).amin()
        x = torch.where((x > least) & (likely.sum() >= 2), -torch.inf, x)
    line.copy_(torch.where(spoilt | (x > -torch.inf), line, -torch.inf))


def _border(order: Tensor, p: Tensor, mass: float, *, strict: bool) -> Tensor:
    """The order of the last token of the smallest set, the first ones in this order, that has this mass, or more where strict."""
    ordered = order.sort(stable=True)
    p = p[ordered.indices]
    before = p.cumsum(0) - p
    return torch.where(before <= mass if strict else before < mass, ordered.values, -torch.inf).amax()
