"""From experts to the slots that hold them, and their counts (see reference.py for the formula), in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl

BLOCK = 256


@triton.jit
def _slots_of(
    experts, table, counts, slots, total, first,
    TOPK: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < total
    pdl.follow(PDL)
    line = tl.load(experts + at, mask=real, other=-1) + 1
    turn = (at // TOPK + first) % TURNS
    tl.store(slots + at, tl.load(table + line * TURNS + turn, mask=real, other=-1), mask=real)
    tl.atomic_add(counts + line, tl.full((BLOCK,), 1, tl.int64), mask=real, sem="relaxed")


def slots_of(experts: Tensor, table: Tensor, counts: Tensor, first: int) -> Tensor:
    """The slot of each chosen expert; counts [experts + 1] grow by the choices. All are dense."""
    slots = torch.empty_like(experts)
    _slots_of[(triton.cdiv(experts.numel(), BLOCK),)](
        experts, table, counts, slots, experts.numel(), first,
        TOPK=experts.shape[1], TURNS=table.shape[1], BLOCK=BLOCK,
        num_warps=4, **pdl.options(experts),
    )  # fmt: skip
    return slots
