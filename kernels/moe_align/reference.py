"""Rows in the order of their experts, in plain torch (waits for the device)."""

import torch
from torch import Tensor


def align(experts: Tensor, num_experts: int, block: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """See kernel.py."""
    flat = experts.flatten()
    ids, positions = torch.full((most,), -1, dtype=torch.int32), torch.full_like(flat, -1)
    ends, begin = torch.empty(num_experts, dtype=torch.int32), 0
    for expert in range(num_experts):
        mine = (flat == expert).nonzero().flatten()
        ids[begin : begin + len(mine)] = mine.to(torch.int32)
        positions[mine] = torch.arange(begin, begin + len(mine), dtype=torch.int32, device=flat.device)
        begin += -(-len(mine) // block) * block
        ends[expert] = begin // block
    return ids, positions.view(experts.shape), ends
