"""The reference of gated_norm/kernel.py in torch: the norm of each group of a line's numbers, before or after it is multiplied by
silu(gate) (Dao and Gu 2024, "SSD", section 7: before; Yang et al. 2024, "Gated Delta Networks": after)."""

import torch.nn.functional as F
from torch import Tensor


def gated_norm(y: Tensor, gate: Tensor, weight: Tensor | None, eps: float, group: int, *, before: bool) -> Tensor:
    """y, gate [m, n] -> [m, n]; weight [n], or [group] for all groups, or None: no norm. before: it stands before the gate."""
    values, gates = y.float(), F.silu(gate.float())
    if weight is None:
        return (values * gates).to(y.dtype)
    groups = (values if before else values * gates).unflatten(1, (-1, group))
    normed = F.rms_norm(groups, (group,), eps=eps).flatten(1)
    scale = weight.repeat(y.shape[1] // len(weight))
    return (scale * normed * gates).to(y.dtype) if before else scale * normed.to(y.dtype)
