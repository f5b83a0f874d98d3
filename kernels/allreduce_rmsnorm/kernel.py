"""The sum over tensor-parallel ranks, its addition to the residual stream, and the norm of that: one kernel through peer memory.

    residual += sum over ranks of x          (rounded to the stream's dtype after the sum, and after the addition)
    out = residual / sqrt(mean(residual^2) + eps) * weight          (Zhang and Sennrich 2019, eq. 4)

One program a row. It writes its row into the ranks' inboxes, waits for what they write into its own, and sums that in the order of the
ranks, so that all get the same bits: one trip over NVLink. Two protocols:

    few rows: packets (kernels/packets.py). Twice the bytes, but nothing to wait for except the packets themselves.
    more:     plain rows, then a flag that is released after them: a fence on one side, and an acquire and a read on the other.

Inboxes have two halves, used in turn. A rank that writes into a half for the second time, in turn t + 2, has received the
peers' packets or flags of turn t + 1. These were sent by a kernel that ran after the peer's kernel of turn t, which had read
that half, was done (with a programmatic launch too: nothing is sent before gdc_wait); so nobody waits after reading. Turns are
counted by row, for both protocols together, on the device: a CUDA graph replays with new numbers. All ranks make the same
calls, on one stream each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import packets, pdl
from meshlm.kernels.packets import FOR_EVER


# Not aligned, for the compiler's knowledge: neighbouring lanes must have neighbouring packets, not four each.
@triton.jit(do_not_specialize=["nth", "patience"], do_not_specialize_on_alignment=["x", "residual", "weight", "out"])
def _by_packets(
    x, residual, weight, out, inboxes, turns, nth, eps, patience,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
    SENT: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x, residual, weight, out: words (int32) of two columns, or of one. SENT: x has been, by kernels/gemv."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < WORDS
    scale, scale_odd = packets.columns_of(tl.load(weight + at, mask=inside, other=0), PAIRS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    turn = tl.load(turns + row) + nth
    slot = ((turn & 1) * (SIZE * ROWS) + row) * WORDS
    if not SENT:
        mine = tl.load(x + row * WORDS + at, mask=inside, other=0)
        for peer in tl.static_range(SIZE):
            there = tl.load(inboxes + peer) + (slot + RANK * ROWS * WORDS + at).to(tl.int64) * 8
            packets.send(there, mine, turn, inside)
    stream, stream_odd = packets.columns_of(tl.load(residual + row * WORDS + at, mask=inside, other=0), PAIRS)
    nth = slot + tl.minimum(at, WORDS - 1)  # beside the row no packet ever comes
    total, total_odd = packets.receive(tl.load(inboxes + RANK), nth, turn, patience, SIZE, ROWS * WORDS, PAIRS, WAIT)
    line = packets.rounded(packets.rounded(total, PAIRS) + stream, PAIRS)
    odd = packets.rounded(packets.rounded(total_odd, PAIRS) + stream_odd, PAIRS)
    tl.store(residual + row * WORDS + at, packets.words_of(line, odd, PAIRS), mask=inside)
    columns: tl.constexpr = WORDS * 2 if PAIRS else WORDS
    squares = tl.sum(tl.where(inside, line * line + odd * odd, 0.0), axis=0)
    inverse = tl.rsqrt(squares / columns + eps)
    normed = packets.words_of(line * inverse * scale, odd * inverse * scale_odd, PAIRS)
    tl.store(out + row * WORDS + at, normed, mask=inside)
    tl.store(turns + row, turn + 1)


@triton.jit(do_not_specialize=["patience"])
def _by_flags(
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


class Workspace:
    """The ranks' shared memory, zeros at first: an inbox of packets int64 [2, size, rows, words], another [2, size, rows, columns] of
    the stream's dtype, and flags int32 [size, rows]. A word is four bytes.

    addresses: of these three int64 [size] on the device, by rank. turns: int32 [rows], ones, of this rank alone. packet_rows: up to how
    many rows go as packets; the same on all ranks."""

    __slots__ = ("columns", "flags", "inboxes", "packet_rows", "packets", "rank", "rows", "size", "turns")

    def __init__(
        self, rank: int, size: int, rows: int, columns: int, addresses: tuple[Tensor, Tensor, Tensor], turns: Tensor,
        packet_rows: int,
    ) -> None:  # fmt: skip
        self.rank, self.size, self.rows, self.columns = rank, size, rows, columns
        self.packets, self.inboxes, self.flags = addresses
        self.turns, self.packet_rows = turns, packet_rows


def words(columns: int, dtype: torch.dtype) -> int:
    """The number of words of a row; whole ones only."""
    return columns * dtype.itemsize // 4


def allreduce_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, workspace: Workspace, patience: int = FOR_EVER,
    sent: int | None = None,
) -> Tensor:  # fmt: skip
    """x, residual [m, columns], dense, m <= room.rows -> [m, columns]; residual changes in place. All ranks call it alike.

    sent: x, one row, is on its way already (gemv), as turn number `sent` behind the last allreduce_rmsnorm."""
    rows, columns = x.shape
    assert rows <= workspace.rows and columns == workspace.columns  # noqa: PT018
    out = torch.empty_like(residual)
    options = pdl.options(x)
    if sent is not None or (rows <= workspace.packet_rows and columns * x.dtype.itemsize % 4 == 0):
        count, pairs = words(columns, x.dtype), packets.pairs(x.dtype)
        block = triton.next_power_of_2(count)
        warps = min(16, max(4, block // 64))
        wait = packets.wait(workspace.size, workspace.rows * count, pairs, max(1, block // (32 * warps)))
        _by_packets[(rows,)](
            *(t.view(torch.int32) for t in (x, residual, weight, out)), workspace.packets, workspace.turns, sent or 0, eps, patience,
            RANK=workspace.rank, SIZE=workspace.size, ROWS=workspace.rows, WORDS=count, BLOCK=block, PAIRS=pairs, SENT=sent is not None,
            WAIT=wait if x.is_cuda else packets.PLAIN, num_warps=warps, **options,
        )  # fmt: skip
        return out
    block = triton.next_power_of_2(columns)
    _by_flags[(rows,)](
        x, residual, weight, out, workspace.inboxes, workspace.flags, workspace.turns, columns, eps, patience,
        RANK=workspace.rank, SIZE=workspace.size, ROWS=workspace.rows, BLOCK=block,
        num_warps=min(16, max(4, block // 256)), **options,
    )  # fmt: skip
    return out
