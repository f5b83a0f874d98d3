"""For which weights and numbers of rows kernel.py computes, and in which tiles. Without Gluon, which takes long to import."""

from typing import NamedTuple

from meshlm.kernels import tables
from meshlm.kernels.packed_gemm.reference import CHUNK, PackedWeight

OP = "packed_few"
MOST_ROWS = 16
MOST_WARPS = 8
SIZES = (1, 4, 8, 16)
"""So many rows meet every variant that a tuned shape has."""


class Shape(NamedTuple):
    """Times 16 outputs of a program; its warps, which share out the chunks (powers of two); chunks that each prefetches."""

    tiles: int
    warps: int
    depth: int = 1


def shapes_of(chunks: int) -> list[Shape]:
    """Shapes that may be the fastest for a weight of so many chunks, the likeliest first.

    For each product of Llama-3.1-8B on an H200 the fastest was one of them, none with 1, 2 or 16 warps."""
    warps = min(MOST_WARPS, 1 << (chunks.bit_length() - 1))
    return [
        Shape(tiles, each, depth)
        for tiles in (1, 2)
        for depth in (4, 1)
        for each in sorted({warps, max(1, warps // 2)})
        if depth == 1 or chunks > each
    ]


def kind_of(weight: PackedWeight) -> str:
    """The name by which the tuner tells weights apart, beside their sizes."""
    way = "zeros" if weight.zeros is not None else "minima" if weight.minima is not None else "symmetric"
    return f"{way}, groups of {min(weight.group, CHUNK)}"


@tables.remembered
def shape_for(rows: int, outputs: int, inputs: int, kind: str) -> Shape | None:
    """The shape that was measured to be faster than what kernels/packed_gemm does; None where none was."""
    key = outputs, inputs, kind
    tables.note_use(OP, key)
    choices = [(over, to, Shape(*shape)) for over, to, shape in tables.products(OP).get(key, [])]
    return tables.for_rows(choices, rows)


def takes(weight: PackedWeight) -> bool:
    """4 bits that stand for integers; no group has a part of a plane, or of a half of a chunk and of the other one."""
    return weight.bits == 4 and weight.table is None and (weight.group in (32, 64) or weight.group % 128 == 0)
