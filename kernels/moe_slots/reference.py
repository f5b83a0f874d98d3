"""From experts to the slots of ranks that hold them, in plain torch; and how many tokens each expert has had.

slot[t, j] = table[expert[t, j] + 1, (t + first) mod turns];   counts[expert[t, j] + 1] += 1
"""

import torch
from torch import Tensor


def slots_of(experts: Tensor, table: Tensor, counts: Tensor, first: int) -> Tensor:
    """experts int32 [m, k], -1 for none. table int32 [1 + experts, turns] and counts int64 [1 + experts]: of none, then of each."""
    line, num_turns = experts + 1, table.shape[1]
    counts.index_add_(0, line.flatten(), torch.ones_like(counts[:1]).expand(line.numel()))
    turns = (torch.arange(len(line), device=line.device) + first) % num_turns
    return table.take(torch.add(turns[:, None], line, alpha=num_turns))
