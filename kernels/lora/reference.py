"""The reference of lora/kernel.py, in plain torch."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshlm.kernels.lora.layout import Pair


def token_slots(rows: Tensor, ends: Tensor, n: int, adapters: Tensor, tokens: int) -> Tensor:
    """See kernel.py."""
    found = torch.full((tokens,), -1, dtype=torch.int32)
    begin = 0
    for row, end in zip(rows[:n].tolist(), ends[:n].tolist(), strict=True):
        found[begin:end] = int(adapters[row]) - 1
        begin = end
    return found.to(rows.device)


def add_adapters(
    x: Tensor, out: Tensor, slots: Tensor, adapters: Sequence[Mapping[int, Pair]], slices: Sequence[tuple[int, int]]
) -> Tensor:
    """x [t, inputs], out [t, outputs], slots int [t] (-1: none), adapters: by slot, its pairs by the number of their slice (begin, end)
    of the outputs. out with what the adapters add; it stays as it is."""
    found = out.to(torch.float32, copy=True)
    for slot, pairs in enumerate(adapters):
        mine = torch.nonzero(slots == slot).flatten()
        for which, (a, b) in pairs.items():
            begin, end = slices[which]
            low = x[mine].float() @ a.float().t()
            found[mine, begin:end] += low.to(x.dtype).float() @ b.float().t()
    return found.to(out.dtype)
