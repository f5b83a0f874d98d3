"""How adapters lie in a GPU's memory: each has a slot of equal size, in which its matrices follow one another.

The matrices of a model have numbers, those of one layer follow one another. A table says of each slot and matrix where A [rank, inputs]
and B [outputs, rank] begin, and what the rank is, rounded up to a multiple of LINE: what is added to A and B is zeros. A rank of 0: the
slot's adapter has nothing for that matrix. So an adapter takes as much of its slot as it has, and a load is one copy.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

LINE = 16  # numbers; products of tensor cores have inner dimensions of multiples of it
NUMBERS = 3  # of a place: where A begins, where B begins, the rank


def padded(rank: int) -> int:
    """The rank that a matrix has in memory."""
    return -(-rank // LINE) * LINE


def wide_of(max_rank: int) -> int:
    """The numbers that `low` has room for, of each matrix: such that programs take equal parts of it."""
    return padded(max_rank) if max_rank <= 4 * LINE else -(-max_rank // (4 * LINE)) * 4 * LINE


class Pair(NamedTuple):
    """An adapter's part of one matrix."""

    a: Tensor  # [rank, inputs]
    b: Tensor  # [outputs, rank], multiplied by the adapter's scale


class Packed(NamedTuple):
    """An adapter as it lies in a slot."""

    values: Tensor  # [any]
    places: Tensor  # int64 [matrices, NUMBERS]; begins are counted from the slot's


class Memory(NamedTuple):
    """All slots."""

    values: Tensor  # [any]
    places: Tensor  # int64 [slots, matrices, NUMBERS]; begins are counted from the first slot's
    rank: int  # `wide_of` the largest that an adapter may have


class LayerPlaces:
    """The matrices of one layer: their outputs, as begin and end, in order; and the number of the first one."""

    def __init__(self, first: int, slices: Sequence[tuple[int, int]], device: torch.device) -> None:
        self.first, self.slices, self._device = first, tuple(slices), device
        self._blocks: dict[int, Tensor] = {}

    @property
    def num_slices(self) -> int:
        return len(self.slices)

    def blocks(self, size: int) -> Tensor:
        """int32 [blocks, 4]: blocks of at most so many outputs, none of which is of two matrices. Begin, end, which of the layer's
        matrices it is of, and the line of that matrix's B with which it begins."""
        if (found := self._blocks.get(size)) is None:
            found = self._blocks[size] = _blocks(self.slices, size, self._device)
        return found


@cache
def _blocks(slices: tuple[tuple[int, int], ...], size: int, device: torch.device) -> Tensor:
    """Layers of equal sizes share one."""
    lines = [
        (at, min(at + size, end), nth, at - begin)
        for nth, (begin, end) in enumerate(slices)
        for at in range(begin, end, size)
    ]
    return torch.tensor(lines, dtype=torch.int32).to(device)


def num_values(rank: int, inputs: int, outputs: int) -> int:
    """The numbers that a pair of this rank takes."""
    return padded(padded(rank) * inputs) + padded(padded(rank) * outputs)


def pack(pairs: Mapping[int, Pair], matrices: int, dtype: torch.dtype) -> Packed:
    """pairs: by the number of their matrix, of which there are so many."""
    sizes = {which: num_values(len(pair.a), pair.a.shape[1], len(pair.b)) for which, pair in pairs.items()}
    values = torch.zeros(sum(sizes.values()), dtype=dtype)
    places, begin = torch.zeros(matrices, NUMBERS, dtype=torch.int64), 0
    for which, (a, b) in pairs.items():
        rank, inputs = padded(len(a)), a.shape[1]
        behind = begin + padded(rank * inputs)
        values[begin : begin + rank * inputs].view(rank, inputs)[: len(a)] = a
        values[behind : behind + len(b) * rank].view(len(b), rank)[:, : len(a)] = b
        places[which] = torch.tensor((begin, behind, rank))
        begin += sizes[which]
    return Packed(values, places)
