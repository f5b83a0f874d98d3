"""Which experts a token goes to, in plain torch.

s = softmax(logits) or sigmoid(logits)                 float32
choice by s + correction bias; with groups only within the topk_group groups that score best (DeepSeek-AI 2024, section 2.1.2)
w = s of the k chosen; w / sum(w) if renormalised; times the scaling factor
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.kernels.silu_mul.reference import sigmoid


class Rule(NamedTuple):
    """The rule by which experts are chosen."""

    num_topk: int
    sigmoid: bool = False
    renormalise: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    top2_groups: bool = False  # a group scores as its best two experts together, not as its best one


def select_experts(
    logits: Tensor, rule: Rule, correction_bias: Tensor | None = None, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [m, experts] -> int32 [m, k], best first, and float32 [m, k]. Tokens with a negative slot go to expert -1."""
    values = logits.float()
    scores = sigmoid(values) if rule.sigmoid else values.softmax(dim=-1)
    choice = scores if correction_bias is None else scores + correction_bias.float()
    if rule.num_groups > 1:
        grouped = choice.view(len(choice), rule.num_groups, -1)
        best = grouped.topk(2, dim=-1).values.sum(dim=-1) if rule.top2_groups else grouped.amax(dim=-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(rule.topk_groups, dim=-1).indices, True)
        choice = grouped.masked_fill(~kept[:, :, None], -torch.inf).flatten(1)
    experts = choice.topk(rule.num_topk, dim=-1).indices
    weights = scores.gather(1, experts)
    if rule.renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    weights = weights * rule.scaling
    if slots is not None:
        padding = (slots < 0)[:, None]
        experts, weights = experts.masked_fill(padding, -1), weights.masked_fill(padding, 0.0)
    return experts.to(torch.int32), weights
