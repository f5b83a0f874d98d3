"""The sum over tensor-parallel ranks, its addition to the residual stream, and the norm of that: one kernel through peer memory.

    residual += sum over ranks of x          (rounded to the stream's dtype after the sum, and after the addition)
    out = residual / sqrt(mean(residual^2) + eps) * weight          (Zhang and Sennrich 2019, eq. 4)

One program a row. It writes its row into every peer's inbox, raises a flag there, waits for the flags that the peers raise here, and
sums what they wrote in the order of the ranks, so that all get the same bits: one trip over NVLink. Inboxes have two halves, used in
turn. A rank that writes into a half for the second time has had the flags of the turn between, which its peers raised after they had
read that half; so nobody waits after reading. Turns are counted by row, on the device: a CUDA graph replays with new numbers. All ranks
make the same calls, on one stream each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl

FOR_EVER = 2**31 - 1  # polls of a flag, half a microsecond each


@triton.jit(do_not_specialize=["patience"])
def _sum_norm(
    x, residual, weight, out, inboxes, flags, turns, columns, eps, patience,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    turn = tl.load(turns + row)
    half = (turn & 1) * (SIZE * ROWS) + row
    mine = tl.load(x + row * columns + at, mask=inside, other=0.0)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            there = tl.load(inboxes + peer).to(tl.pointer_type(x.dtype.element_ty))
            there = tl.multiple_of(there, 16)
            tl.store(there + (half + RANK * ROWS) * columns + at, mine, mask=inside)
    tl.debug_barrier()  # all of the row is written before one thread raises the flag
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + RANK * ROWS + row
            tl.atomic_xchg(flag, turn, sem="release", scope="sys")
    stream = tl.load(residual + row * columns + at, mask=inside, other=0.0)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            raised = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + peer * ROWS + row
            polls = 0
            seen = tl.atomic_add(raised, 0, sem="acquire", scope="sys")
            while (seen - turn < 0) & (polls < patience):  # a peer may be one turn ahead; numbers wrap
                seen = tl.atomic_add(raised, 0, sem="acquire", scope="sys")
                polls += 1
    tl.debug_barrier()  # one thread has seen the flags: now all may read
    inbox = tl.load(inboxes + RANK).to(tl.pointer_type(x.dtype.element_ty))
    inbox = tl.multiple_of(inbox, 16)
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(SIZE):
        if peer == RANK:
            total += mine.to(tl.float32)
        else:
            came = tl.load(inbox + (half + peer * ROWS) * columns + at, mask=inside, other=0.0, volatile=True)
            total += came.to(tl.float32)
    line = total.to(x.dtype.element_ty).to(tl.float32) + stream.to(tl.float32)
    line = line.to(stream.dtype).to(tl.float32)
    tl.store(residual + row * columns + at, line.to(stream.dtype), mask=inside)
    inverse = tl.rsqrt(tl.sum(line * line, axis=0) / columns + eps)
    tl.store(out + row * columns + at, (line * inverse * scale).to(out.dtype.element_ty), mask=inside)
    tl.store(turns + row, turn + 1)


class Room:
    """What the ranks share. Of each rank: an inbox [2, size, rows, columns] of the stream's dtype and flags int32 [size, rows], zeros.

    inboxes, flags: int64 [size] on the device, their addresses by rank. turns: int32 [rows], ones, of this rank alone.
    """

    __slots__ = ("columns", "flags", "inboxes", "rank", "rows", "size", "turns")

    def __init__(
        self, rank: int, size: int, rows: int, columns: int, addresses: tuple[Tensor, Tensor], turns: Tensor
    ) -> None:
        self.rank, self.size, self.rows, self.columns = rank, size, rows, columns
        self.inboxes, self.flags = addresses
        self.turns = turns


def sum_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, room: Room, patience: int = FOR_EVER) -> Tensor:
    """x, residual [m, columns], dense, m <= room.rows -> [m, columns]; residual changes in place. All ranks call it alike."""
    rows, columns = x.shape
    assert rows <= room.rows and columns == room.columns  # noqa: PT018
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(columns)
    use_pdl = x.is_cuda and pdl.supported()
    _sum_norm[(rows,)](
        x, residual, weight, out, room.inboxes, room.flags, room.turns, columns, eps, patience,
        RANK=room.rank, SIZE=room.size, ROWS=room.rows, BLOCK=block, PDL=use_pdl,
        num_warps=min(16, max(4, block // 256)), **({"launch_pdl": True} if use_pdl else {}),
    )  # fmt: skip
    return out
