"""Tokens to the experts of other ranks and results back, written straight into the peers' memory (NVLink).

    send      row r of x          -> inbox[rank n + r] of each peer that has one of its experts; and which of them, to every peer
    (experts compute the inbox, [size n, hidden])
    give_back row r of peer p     -> results[rank n + r] of p, where this rank had one of its experts
    add       out[r] = sum over the peers with one of r's experts of results[peer n + r]     (float32, in the order of ranks)

n: rows that each rank sends, padding included; the same on all, and fixed in a CUDA graph. Rows that need not travel are not written,
and nobody reads their places. Many rows go all of them, by the GPU's copy engines (`whole`): nearly each of them has an expert
everywhere, and no multiprocessor is kept from computing meanwhile.
Behind `send` and behind `give_back` the ranks meet: `signal` says to all peers that what was written
before it is there, `wait` waits until all have said so. An inbox is written again only after the peers' results have come, which they
computed from it; results only after the peers' next rows have come, which they send when they have added up the last. So there is one
of each. Turns are counted on the device: a CUDA graph replays with new numbers. A word of the host's memory ends all waiting.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns that a program copies at a time


class Room(NamedTuple):
    """The memory that a rank shares, and where its peers' is: int64 [size] on the device, by rank."""

    rank: int
    inbox: Tensor  # [size capacity, hidden]
    lines: Tensor  # int32 [size capacity, 2 k]: local numbers of experts (-1: none), bits of their weights
    results: Tensor  # [size capacity, hidden]
    inboxes: Tensor
    lines_of: Tensor
    results_of: Tensor
    flags_of: Tensor  # of int32 [2 size], zeros: the last turn of each peer, of rows and of results
    turns: Tensor  # int32 [2], zeros: of this rank alone
    stop: Tensor  # int32 [1] in the host's memory: not 0 ends all waiting
    inbox_at: list[Tensor]  # the same memory as tensors, of each rank
    results_at: list[Tensor]


class Owners(NamedTuple):
    """Rank p has `each` experts that begin at p stride + offset."""

    each: int
    stride: int
    offset: int


@triton.jit(do_not_specialize=["n", "count"])
def _send(
    x, experts, weights, inboxes, lines, n, count,
    RANK: tl.constexpr, HIDDEN: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, PER: tl.constexpr, STRIDE: tl.constexpr,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row, peer = tl.program_id(0), tl.program_id(1)
    nth = tl.arange(0, K_BLOCK)
    there = nth < tl.where(row < count, K, 0)
    chosen = tl.load(experts + row * K + nth, mask=there, other=-1)
    first = peer * STRIDE + OFFSET
    mine = there & (chosen >= first) & (chosen < first + PER)
    bits = tl.load(weights + row * K + nth, mask=there, other=0)
    at = (RANK * n + row).to(tl.int64)
    line = tl.load(lines + peer).to(tl.pointer_type(tl.int32)) + at * (2 * K)
    tl.store(line + nth, tl.where(mine, chosen - first, -1), mask=nth < K)
    tl.store(line + K + nth, bits, mask=nth < K)
    if not WHOLE:  # noqa: SIM102 - a kernel decides the one when it is compiled, the other when it runs
        if tl.max(mine.to(tl.int32), axis=0) > 0:
            to = tl.multiple_of(tl.load(inboxes + peer).to(tl.pointer_type(x.dtype.element_ty)), 16) + at * HIDDEN
            for begin in range(0, HIDDEN, BLOCK):
                column = begin + tl.arange(0, BLOCK)
                inside = column < HIDDEN
                tl.store(to + column, tl.load(x + row.to(tl.int64) * HIDDEN + column, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["n"])
def _give_back(
    sums, lines, results, n,
    RANK: tl.constexpr, HIDDEN: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, peer = tl.program_id(0), tl.program_id(1)
    nth = tl.arange(0, K_BLOCK)
    at = (peer * n + row).to(tl.int64)
    local = tl.load(lines + at * (2 * K) + nth, mask=nth < K, other=-1)
    if tl.max(local, axis=0) >= 0:
        to = tl.multiple_of(tl.load(results + peer).to(tl.pointer_type(sums.dtype.element_ty)), 16)
        to += (RANK * n + row).to(tl.int64) * HIDDEN
        for begin in range(0, HIDDEN, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            inside = column < HIDDEN
            tl.store(to + column, tl.load(sums + at * HIDDEN + column, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["n"])
def _add(
    out, experts, results, n,
    SIZE: tl.constexpr, HIDDEN: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, PER: tl.constexpr, STRIDE: tl.constexpr,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    nth = tl.arange(0, K_BLOCK)
    chosen = tl.load(experts + row * K + nth, mask=nth < K, other=-1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(SIZE):
        first = peer * STRIDE + OFFSET
        came = tl.max(((chosen >= first) & (chosen < first + PER)).to(tl.int32), axis=0) > 0
        place = results + (peer * n + row).to(tl.int64) * HIDDEN + column
        total += tl.load(place, mask=column < tl.where(came, HIDDEN, 0), other=0.0, volatile=True).to(tl.float32)
    tl.store(out + row.to(tl.int64) * HIDDEN + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _signal(flags, turns, RANK: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr):
    turn = tl.load(turns + KIND) + 1
    for peer in tl.static_range(SIZE):
        flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + KIND * SIZE + RANK
        tl.atomic_xchg(flag, turn, sem="release", scope="sys")
    tl.store(turns + KIND, turn)


@triton.jit
def _wait(flags, turns, stop, RANK: tl.constexpr, SIZE: tl.constexpr, KIND: tl.constexpr):
    turn = tl.load(turns + KIND)
    for peer in tl.static_range(SIZE):
        flag = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + KIND * SIZE + peer
        ended = 0
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while (seen - turn < 0) & (ended == 0):  # a peer may be ahead; numbers wrap
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            ended = tl.load(stop, volatile=True)


ROWS, RESULTS = 0, 1


def send(
    x: Tensor, experts: Tensor, weights: Tensor, n: int, room: Room, owners: Owners, *, whole: bool = False
) -> None:
    """x [m, hidden], experts int32 [m, k], weights float32 [m, k] of this rank's m <= n rows, and word that they are there."""
    size, (count, hidden), k = len(room.inboxes), x.shape, experts.shape[1]
    _send[n, size](
        x, experts, weights.view(torch.int32), room.inboxes, room.lines_of, n, count,
        room.rank, hidden, k, triton.next_power_of_2(k), *owners, BLOCK, whole,
    )  # fmt: skip
    if whole:
        for inbox in room.inbox_at:
            inbox[room.rank * n : room.rank * n + count].copy_(x)
    _signal[1,](room.flags_of, room.turns, room.rank, size, ROWS)


def give_back(sums: Tensor, n: int, k: int, room: Room, *, whole: bool = False) -> None:
    """sums [size n, hidden]: what this rank's experts give to the rows that it was sent; and word that it is there."""
    size, hidden = len(room.inboxes), sums.shape[1]
    if whole:
        for peer, results in enumerate(room.results_at):
            results[room.rank * n : (room.rank + 1) * n].copy_(sums[peer * n : (peer + 1) * n])
    else:
        _give_back[n, size](
            sums, room.lines, room.results_of, n, room.rank, hidden, k, triton.next_power_of_2(k), BLOCK
        )  # fmt: skip
    _signal[1,](room.flags_of, room.turns, room.rank, size, RESULTS)


def wait(kind: int, room: Room) -> None:
    """Until ROWS or RESULTS of all peers are there, whatever this rank has sent last."""
    _wait[1,](room.flags_of, room.turns, room.stop, room.rank, len(room.inboxes), kind)


def add(experts: Tensor, n: int, room: Room, owners: Owners) -> Tensor:
    """The sum over ranks [m, hidden] for the rows of these experts int32 [m, k]."""
    (count, k), hidden = experts.shape, room.results.shape[1]
    out = torch.empty(count, hidden, dtype=room.results.dtype, device=experts.device)
    if count:
        _add[count, triton.cdiv(hidden, BLOCK)](
            out, experts, room.results, n, len(room.inboxes), hidden, k, triton.next_power_of_2(k), *owners, BLOCK
        )
    return out
