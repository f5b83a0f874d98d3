"""Rows in the order of their experts, in plain torch (waits for the device)."""

import torch
from torch import Tensor

from meshlm.kernels.moe_align.kernel import ROWS, Order


def align(experts: Tensor, num_experts: int, block: int, most: int) -> Order:
    """The result of kernel.align: rows in the order of their experts, each expert's padded to whole tiles."""
    flat = experts.flatten()
    ids, positions = torch.full((most,), -1, dtype=torch.int32), torch.full_like(flat, -1)
    ends, begin, owners = torch.empty(num_experts, dtype=torch.int32), 0, []
    for expert in range(num_experts):
        mine = (flat == expert).nonzero().flatten()
        ids[begin : begin + len(mine)] = mine.to(torch.int32)
        positions[mine] = torch.arange(begin, begin + len(mine), dtype=torch.int32, device=flat.device)
        owners += [expert + ROWS * min(len(mine) - row, block) for row in range(0, len(mine), block)]
        begin += -(-len(mine) // block) * block
        ends[expert] = begin // block
    return Order(ids, positions.view(experts.shape), ends, torch.tensor(owners, dtype=torch.int32))
