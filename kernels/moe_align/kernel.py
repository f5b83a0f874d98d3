"""The order of rows in which those of one expert follow one another, each expert's beginning at a multiple of a tile's rows.

    experts int32 [m, k]: an entry is a token's jth expert, number t k + j; -1 goes nowhere
    ids[position] = entry or -1 (padding);  positions[entry] = position or -1;  ends[e]: the tiles of experts up to e
    owners[tile] = expert + ROWS times the rows of the tile that are real

A counting sort that keeps the order of entries: each is put behind those before it. Of few entries each program counts all of them and
places some. Of many a kernel counts chunks of them, a second one adds up what is before each chunk, and a third one places them.
Nothing waits for the host, and shapes follow from m, k and the number of experts alone. Behind the last expert's tiles ids are
anything.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl

CHUNK = 64  # entries that a program places
FEW = 2048  # entries that each program counts for itself
LINES, EACH = 512, 4  # chunks whose counts are added up at a time, and the experts of a program that does it
ROWS = 1 << 16  # more than there are experts
EACH_ROW = tl.constexpr(ROWS)
ALIGNED = 4  # integers: buffers begin where any kernel likes them to


@triton.jit
def _put(
    expert, entry, before, tiles, end, ids, positions, owners, entries, experts, share, shares, total,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Entries of one chunk to their places, `before` those of their experts in earlier chunks; and a share of the padding of tiles."""
    nth = tl.arange(0, CHUNK)
    again = tl.load(experts + share * CHUNK + nth, mask=share * CHUNK + nth < entries, other=-1)
    begin = (end - tiles) * BLOCK
    nothing = tl.full((BLOCK_E,), -1, tl.int32)
    for behind in range(share, BLOCK - 1, shares):
        place = begin + total + behind
        tl.store(ids + place, nothing, mask=place < end * BLOCK)
    at = tl.arange(0, BLOCK_E)
    for tile in range(share, tl.max(tiles, axis=0), shares):
        tl.store(
            owners + end - tiles + tile, at + tl.minimum(total - tile * BLOCK, BLOCK) * EACH_ROW, mask=tile < tiles
        )
    within = tl.sum(((expert[:, None] == again[None, :]) & (nth[None, :] < nth[:, None])).to(tl.int32), axis=1)
    first = tl.gather(begin + before, tl.maximum(expert, 0), axis=0)
    real = expert >= 0
    tl.store(ids + first + within, entry, mask=real)
    tl.store(positions + entry, tl.where(real, first + within, -1), mask=entry < entries)


@triton.jit(do_not_specialize=["entries"])
def _align_few(
    experts, ids, positions, ends, owners, entries,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ENTRIES: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All of it. ENTRIES: a power of two, enough for them."""
    pdl.follow(PDL)
    chunk, every, at = tl.program_id(0), tl.arange(0, ENTRIES), tl.arange(0, BLOCK_E)
    entry = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts + entry, mask=entry < entries, other=-1)
    one = tl.load(experts + every, mask=every < entries, other=-1)
    total = tl.histogram(tl.maximum(one, 0), BLOCK_E, mask=one >= 0)
    before = tl.histogram(tl.maximum(one, 0), BLOCK_E, mask=(one >= 0) & (every < chunk * CHUNK))
    tiles = (total + BLOCK - 1) // BLOCK
    end = tl.cumsum(tiles, axis=0)
    if chunk == 0:
        tl.store(ends + at, end, mask=at < EXPERTS)
    _put(
        expert, entry, before, tiles, end, ids, positions, owners, entries, experts, chunk, tl.num_programs(0), total,
        BLOCK, CHUNK, BLOCK_E,
    )  # fmt: skip


@triton.jit(do_not_specialize=["entries"])
def _count(
    experts, counts, entries, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """counts int32 [chunks + 1, EXPERTS]; nobody needs the last line yet."""
    pdl.follow(PDL)
    at = tl.arange(0, BLOCK_E)
    entry = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts + entry, mask=entry < entries, other=-1)
    found = tl.histogram(tl.maximum(expert, 0), BLOCK_E, mask=expert >= 0)
    tl.store(counts + tl.program_id(0) * EXPERTS + at, found, mask=at < EXPERTS)


@triton.jit(do_not_specialize=["chunks"])
def _sum_up(counts, chunks, EXPERTS: tl.constexpr, LINES: tl.constexpr, EACH: tl.constexpr, PDL: tl.constexpr):
    """A chunk's counts become those of the chunks before it, the last line those of all."""
    pdl.follow(PDL)
    at = tl.program_id(0) * EACH + tl.arange(0, EACH)
    total = tl.zeros((EACH,), tl.int32)
    for first in range(0, chunks, LINES):
        line = first + tl.arange(0, LINES)
        place = line[:, None] * EXPERTS + at[None, :]
        inside = (line < chunks)[:, None] & (at < EXPERTS)[None, :]
        found = tl.load(counts + place, mask=inside, other=0)
        tl.store(counts + place, total[None, :] + tl.cumsum(found, axis=0) - found, mask=inside)
        total += tl.sum(found, axis=0)
    tl.store(counts + chunks * EXPERTS + at, total, mask=at < EXPERTS)


@triton.jit(do_not_specialize=["entries"])
def _place(
    experts, counts, ids, positions, ends, owners, entries,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl.follow(PDL)
    chunk, at = tl.program_id(0), tl.arange(0, BLOCK_E)
    entry = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts + entry, mask=entry < entries, other=-1)
    total = tl.load(counts + tl.num_programs(0) * EXPERTS + at, mask=at < EXPERTS, other=0)
    before = tl.load(counts + chunk * EXPERTS + at, mask=at < EXPERTS, other=0)
    tiles = (total + BLOCK - 1) // BLOCK
    end = tl.cumsum(tiles, axis=0)
    if chunk == 0:
        tl.store(ends + at, end, mask=at < EXPERTS)
    _put(
        expert, entry, before, tiles, end, ids, positions, owners, entries, experts, chunk, tl.num_programs(0), total,
        BLOCK, CHUNK, BLOCK_E,
    )  # fmt: skip


def most_tiles(entries: int, num_experts: int, block: int) -> int:
    return (entries + min(entries, num_experts) * (block - 1)) // block


def counted_at_once(entries: int) -> int:
    """The variant of the kernel that orders so few entries alone; 0: they are many."""
    return max(CHUNK, triton.next_power_of_2(entries)) if entries <= FEW else 0


class Order(NamedTuple):
    """The order of rows by their experts. All int32: [most_tiles * block], [m, k], [num_experts], [most_tiles]."""

    ids: Tensor
    positions: Tensor
    ends: Tensor
    owners: Tensor


def align(experts: Tensor, num_experts: int, block: int) -> Order:
    """experts int32 [m, k], dense."""
    entries, at_once = experts.numel(), counted_at_once(experts.numel())
    tiles, chunks = most_tiles(entries, num_experts, block), triton.cdiv(entries, CHUNK)
    lines = 0 if at_once else chunks + 1
    sizes = [
        -(-size // ALIGNED) * ALIGNED for size in (tiles * block, entries, num_experts, tiles, lines * num_experts)
    ]
    workspace = torch.empty(sum(sizes), dtype=torch.int32, device=experts.device)
    ids, positions, ends, owners, counts = workspace.split(sizes)
    found = Order(ids[: tiles * block], positions[:entries].view(experts.shape), ends[:num_experts], owners[:tiles])
    options, block_e = pdl.options(experts), triton.next_power_of_2(num_experts)
    place: dict[str, int] = {"EXPERTS": num_experts, "BLOCK": block, "CHUNK": CHUNK, "BLOCK_E": block_e, "num_warps": 4}
    if at_once:
        _align_few[(chunks,)](experts, ids, positions, ends, owners, entries, ENTRIES=at_once, **place, **options)
        return found
    _count[(chunks,)](
        experts, counts, entries, EXPERTS=num_experts, CHUNK=CHUNK, BLOCK_E=block_e, num_warps=1, **options
    )
    _sum_up[(triton.cdiv(num_experts, EACH),)](
        counts, chunks, EXPERTS=num_experts, LINES=LINES, EACH=EACH, num_warps=4, **options
    )
    _place[(chunks,)](experts, counts, ids, positions, ends, owners, entries, **place, **options)
    return found
