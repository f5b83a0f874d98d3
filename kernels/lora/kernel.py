"""What adapters (LoRA, Hu et al. 2021) add to a layer's product, each token by the adapter of its row:

    out[t, n] += sum over r of B[n, r] low[t, r],    low[t, r] = sum over k of A[r, k] x[t, k]

A layer may hold several matrices, one below the other (query, key and value; gate and up), each with an A and a B of its own. Two
kernels do all of them: the first one (`shrink`) gives `low`, the second one (`expand`) adds to the product where it lies.

Tokens are put in order by their adapters once a step (kernels/moe_align), so that a tile of tokens has one adapter; tokens without one
are in no tile, and cost nothing. How many tiles there are the device knows alone: a CUDA graph launches programs for the most that
there may be, and those without a tile end at once. So do those of a matrix for which the tile's adapter has nothing.

`low` is in parts, each of some of the inputs, so that few tokens keep a whole GPU busy; `expand` adds the parts up in float32 and
always in the same order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.lora.layout import LINE, NUMBERS, LayerPlaces, Memory
from meshlm.kernels.moe_align.kernel import EACH_ROW, Order, align

FEW_TOKENS = 512  # of a step whose tiles are small
MOST_SPLITS = 16
PROGRAMS = 264  # that fill a GPU of some hundred multiprocessors
EACH_NUMBER, EACH_LINE = tl.constexpr(NUMBERS), tl.constexpr(LINE)


class Tile(NamedTuple):
    """Tokens, outputs and inputs of a program; numbers of `low` that it computes or reads at a time, at most."""

    tokens: int
    outputs: int
    inputs: int
    ranks: int = 64


SMALL, LARGE = Tile(16, 128, 128), Tile(64, 128, 64)
OUTPUTS = {SMALL.outputs, LARGE.outputs}  # of which sizes layers have blocks


def tile_of(tokens: int) -> Tile:
    """The tile for a step of so many tokens."""
    return SMALL if tokens <= FEW_TOKENS else LARGE


def warm_rows() -> set[int]:
    """So many tokens meet every variant of the kernels."""
    return {1, FEW_TOKENS, FEW_TOKENS + 1}


class StepOrder(NamedTuple):
    """The tokens of a step in the order of their adapters."""

    order: Order
    slots: int
    tile: Tile

    @property
    def num_tiles(self) -> int:
        """The most that there may be."""
        return len(self.order.owners)


@triton.jit(do_not_specialize=["n", "tokens"])
def _token_slots(rows, ends, adapters, slots, n, tokens, BLOCK: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    pdl.follow(PDL)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    request = tl.zeros((BLOCK,), tl.int32)  # the first one with token < ends[request]
    for first in range(0, n, CHUNK):
        at = first + tl.arange(0, CHUNK)
        end = tl.load(ends + at, mask=at < n, other=2147483647)
        request += tl.sum((end[None, :] <= token[:, None]).to(tl.int32), axis=1)
    real = request < n
    row = tl.load(rows + request, mask=real, other=0).to(tl.int64)
    adapter = tl.load(adapters + row, mask=real, other=0)
    tl.store(slots + token, adapter - 1, mask=token < tokens)


def token_slots(rows: Tensor, ends: Tensor, n: int, adapters: Tensor, tokens: int) -> Tensor:
    """int32 [tokens]: the slot of each token's adapter, -1 where its row has none, and for padding.

    rows, ends int32 [>= n]: of the step's requests (kernels/prepare_inputs). adapters int32 [rows]: 1 + the slot of each row's adapter;
    0: it has none."""
    slots = torch.empty(tokens, dtype=torch.int32, device=rows.device)
    _token_slots[(triton.cdiv(tokens, 64),)](
        rows, ends, adapters, slots, n, tokens, BLOCK=64, CHUNK=64, num_warps=4, **pdl.options(rows)
    )
    return slots


def in_order(slots: Tensor, num_slots: int) -> StepOrder:
    """slots int32 [t]: of each token, -1: none."""
    tile = tile_of(len(slots))
    return StepOrder(align(slots.view(-1, 1), num_slots, tile.tokens), num_slots, tile)


@triton.jit
def _tile_of(tile, ids, owners, BLOCK_M: tl.constexpr):
    """The slot of a tile, and its tokens; -1 is padding."""
    slot = tl.load(owners + tile) % EACH_ROW
    return slot.to(tl.int64), tl.load(ids + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)


@triton.jit(do_not_specialize=["first", "matrices", "positions", "splits"])
def _shrink(
    x, low, values, places, ids, owners, ends, x_stride, inputs, first, matrices, positions, splits,
    SLOTS: tl.constexpr, SLICES: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """WIDE: numbers of `low` of each matrix, a multiple of BLOCK_R."""
    pdl.follow(PDL)
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tile < tl.load(ends + SLOTS - 1):
        slot, token = _tile_of(tile, ids, owners, BLOCK_M)
        each: tl.constexpr = WIDE // BLOCK_R
        place = places + (slot * matrices + first + block // each) * EACH_NUMBER
        r, rank = (block % each) * BLOCK_R + tl.arange(0, BLOCK_R), tl.load(place + 2)
        if (block % each) * BLOCK_R < rank:
            a = values + tl.multiple_of(tl.load(place), EACH_LINE)
            real, there = token >= 0, r < rank
            total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for begin in range(split * BLOCK_K, inputs, splits * BLOCK_K):
                k = begin + tl.arange(0, BLOCK_K)
                inside = k < inputs
                lines = tl.load(
                    x + tl.maximum(token, 0)[:, None] * x_stride + k[None, :],
                    mask=real[:, None] & inside[None, :],
                    other=0.0,
                )
                matrix = tl.load(
                    a + r[None, :].to(tl.int64) * inputs + k[:, None], mask=there[None, :] & inside[:, None], other=0.0
                )
                total = tl.dot(lines, matrix, total)
            at = (split * positions + tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
            tl.store(low + at[:, None] * (SLICES * WIDE) + (block // each) * WIDE + r[None, :], total)


@triton.jit(do_not_specialize=["first", "matrices", "positions", "splits"])
def _expand(
    out, low, values, places, blocks, ids, owners, ends, out_stride, first, matrices, positions, splits,
    SLOTS: tl.constexpr, SLICES: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """blocks: of outputs (layout.py). A program adds to those of one block, for one tile of tokens."""
    pdl.follow(PDL)
    tile, block = tl.program_id(0), blocks + tl.program_id(1) * 4
    if tile < tl.load(ends + SLOTS - 1):
        slot, token = _tile_of(tile, ids, owners, BLOCK_M)
        nth = tl.load(block + 2)
        place = places + (slot * matrices + first + nth) * EACH_NUMBER
        rank = tl.load(place + 2)
        if rank > 0:
            begin = tl.load(block)
            n, row = begin + tl.arange(0, BLOCK_N), tl.load(block + 3) + tl.arange(0, BLOCK_N)
            inside, real = n < tl.load(block + 1), token >= 0
            b = values + tl.multiple_of(tl.load(place + 1), EACH_LINE)
            at = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for start in range(0, rank, BLOCK_R):
                r = start + tl.arange(0, BLOCK_R)
                there = r < rank
                inner = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                for split in range(splits):
                    line = low + (split * positions + at)[:, None] * (SLICES * WIDE) + nth * WIDE
                    inner += tl.load(line + r[None, :], mask=there[None, :], other=0.0)
                matrix = tl.load(
                    b + row[None, :].to(tl.int64) * tl.multiple_of(rank, EACH_LINE) + r[:, None],
                    mask=inside[None, :] & there[:, None],
                    other=0.0,
                )
                total = tl.dot(inner.to(matrix.dtype), matrix, total)
            to = out + tl.maximum(token, 0)[:, None] * out_stride + n[None, :]
            mask = real[:, None] & inside[None, :]
            found = tl.load(to, mask=mask, other=0.0).to(tl.float32) + total
            tl.store(to, found.to(out.dtype.element_ty), mask=mask)


def add_adapters(x: Tensor, out: Tensor, layer: LayerPlaces, memory: Memory, step: StepOrder) -> Tensor:
    """out [t, outputs], the layer's product of x [t, inputs], and what the adapters of the tokens add to it, in place. Lines of both
    may be strided."""
    assert x.stride(1) == 1 and out.stride(1) == 1 and len(x) == len(out) == step.order.positions.numel()  # noqa: PT018
    ids, _, ends, owners = step.order
    tile, slices, wide = step.tile, layer.num_slices, memory.rank
    ranks, inputs, tiles = min(tile.ranks, wide), x.shape[1], step.num_tiles
    across, positions = slices * wide // ranks, len(ids)
    splits = max(1, min(MOST_SPLITS, PROGRAMS // (tiles * across), inputs // (2 * tile.inputs)))
    low = torch.empty(splits, positions, slices * wide, dtype=torch.float32, device=x.device)
    options = pdl.options(x)
    _shrink[(tiles, across, splits)](
        x, low, memory.values, memory.places, ids, owners, ends, x.stride(0), inputs, layer.first, memory.places.shape[1],
        positions, splits, SLOTS=step.slots, SLICES=slices, WIDE=wide, BLOCK_M=tile.tokens, BLOCK_R=ranks, BLOCK_K=tile.inputs,
        num_warps=4, **options,
    )  # fmt: skip
    blocks = layer.blocks(tile.outputs)
    _expand[(tiles, len(blocks))](
        out, low, memory.values, memory.places, blocks, ids, owners, ends, out.stride(0), layer.first, memory.places.shape[1],
        positions, splits, SLOTS=step.slots, SLICES=slices, WIDE=wide, BLOCK_M=tile.tokens, BLOCK_N=tile.outputs, BLOCK_R=ranks,
        num_warps=4, **options,
    )  # fmt: skip
    return out
