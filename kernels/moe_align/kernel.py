"""The order of rows in which those of one expert follow one another, each expert's beginning at a multiple of a tile's rows.

    experts int32 [m, k]: an entry is a token's jth expert, number t k + j; -1 goes nowhere
    ids[position] = entry or -1 (padding);  positions[entry] = position or -1;  ends[e]: the tiles of experts up to e

A counting sort that keeps the order of entries: entries are counted by chunk and expert, the counts summed up, each entry put behind
those before it in its chunk. Nothing waits for the host, and shapes follow from m, k and the number of experts alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 128  # entries of a program
FEW, MANY = 16, 128  # chunks that are summed up at a time: one program does it, and each time it waits for memory
ALIGNED = 4  # integers: buffers begin where any kernel likes them to


@triton.jit(do_not_specialize=["entries", "most"])
def _count(experts, counts, ids, entries, most, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr):
    """counts int32 [chunks, EXPERTS]. Clears ids on the way."""
    chunk = tl.program_id(0)
    entry = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts + entry, mask=entry < entries, other=-1)
    at = tl.arange(0, BLOCK_E)
    found = tl.sum((expert[:, None] == at[None, :]).to(tl.int32), axis=0)
    tl.store(counts + chunk * EXPERTS + at, found, mask=at < EXPERTS)
    nothing = tl.full((CHUNK,), -1, tl.int32)
    for first in range(chunk * CHUNK, most, tl.num_programs(0) * CHUNK):
        place = first + tl.arange(0, CHUNK)
        tl.store(ids + place, nothing, mask=place < most)


@triton.jit(do_not_specialize=["chunks"])
def _sum_up(
    counts, ends, chunks, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr, BLOCK_E: tl.constexpr
):
    """counts become the positions of each chunk's first entries."""
    at = tl.arange(0, BLOCK_E)
    inside = at < EXPERTS
    nth = tl.arange(0, LINES)
    total = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, chunks, LINES):
        place = (first + nth)[:, None] * EXPERTS + at[None, :]
        total += tl.sum(
            tl.load(counts + place, mask=((first + nth) < chunks)[:, None] & inside[None, :], other=0), axis=0
        )
    tiles = (total + BLOCK - 1) // BLOCK
    end = tl.cumsum(tiles, axis=0)
    tl.store(ends + at, end, mask=inside)
    begin = (end - tiles) * BLOCK
    for first in range(0, chunks, LINES):
        place = (first + nth)[:, None] * EXPERTS + at[None, :]
        mask = ((first + nth) < chunks)[:, None] & inside[None, :]
        found = tl.load(counts + place, mask=mask, other=0)
        tl.store(counts + place, begin[None, :] + tl.cumsum(found, axis=0) - found, mask=mask)
        begin += tl.sum(found, axis=0)


@triton.jit(do_not_specialize=["entries"])
def _place(experts, counts, ids, positions, entries, EXPERTS: tl.constexpr, CHUNK: tl.constexpr):
    nth = tl.arange(0, CHUNK)
    entry = tl.program_id(0) * CHUNK + nth
    expert = tl.load(experts + entry, mask=entry < entries, other=-1)
    again = tl.load(experts + tl.program_id(0) * CHUNK + nth, mask=entry < entries, other=-1)
    before = tl.sum(((expert[:, None] == again[None, :]) & (nth[None, :] < nth[:, None])).to(tl.int32), axis=1)
    real = expert >= 0
    position = tl.load(counts + tl.program_id(0) * EXPERTS + expert, mask=real, other=0) + before
    tl.store(ids + position, entry, mask=real)
    tl.store(positions + entry, tl.where(real, position, -1), mask=entry < entries)


def most_tiles(entries: int, num_experts: int, block: int) -> int:
    """Tiles that there may be."""
    return (entries + min(entries, num_experts) * (block - 1)) // block


def align(experts: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """experts int32 [m, k], dense -> ids int32 [most_tiles * block], positions int32 [m, k], ends int32 [num_experts]."""
    entries = experts.numel()
    most, chunks = most_tiles(entries, num_experts, block) * block, triton.cdiv(entries, CHUNK)
    sizes = [-(-size // ALIGNED) * ALIGNED for size in (most, entries, num_experts, chunks * num_experts)]
    workspace = torch.empty(sum(sizes), dtype=torch.int32, device=experts.device)
    ids, positions, ends, counts = workspace.split(sizes)
    block_e = triton.next_power_of_2(num_experts)
    _count[(chunks,)](
        experts, counts, ids, entries, most, EXPERTS=num_experts, CHUNK=CHUNK, BLOCK_E=block_e, num_warps=4
    )
    _sum_up[(1,)](
        counts,
        ends,
        chunks,
        EXPERTS=num_experts,
        BLOCK=block,
        LINES=FEW if chunks <= FEW else min(MANY, max(FEW, 16384 // block_e)),
        BLOCK_E=block_e,
        num_warps=8,
    )
    _place[(chunks,)](experts, counts, ids, positions, entries, EXPERTS=num_experts, CHUNK=CHUNK, num_warps=4)
    return ids[:most], positions[:entries].view(experts.shape), ends[:num_experts]
