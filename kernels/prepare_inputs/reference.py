"""The reference of prepare_inputs/kernel.py, in plain torch."""

import torch
from torch import Tensor


def prepare_inputs(
    rows: Tensor, starts: Tensor, ends: Tensor, n: int, tokens: Tensor, blocks: Tensor, block_size: int,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:  # fmt: skip
    input_ids, positions, slots = out
    input_ids.zero_()
    positions.zero_()
    slots.fill_(-1)
    begin = 0
    for row, start, end in zip(rows[:n].tolist(), starts[:n].tolist(), ends[:n].tolist(), strict=True):
        at = torch.arange(start, start + end - begin, device=rows.device)
        positions[begin:end] = at
        input_ids[begin:end] = tokens[row, at].long()
        slots[:, begin:end] = blocks[:, row, at // block_size].long() * block_size + at % block_size
        begin = end


def scatter(updates: Tensor, num_segments: int, state: Tensor) -> None:
    base = 3 * num_segments
    for to, begin, length in updates[:base].view(-1, 3).tolist():
        state[to : to + length] = updates[base + begin : base + begin + length]
