"""For which weights and numbers of rows kernel.py computes, and in which tiles. Without Gluon, which takes long to import."""

from typing import NamedTuple

import torch
import triton

from meshlm.kernels import pdl, tables
from meshlm.kernels.packed_gemm.reference import CHUNK, PackedWeight

OP = "packed_few"
MOST_ROWS = 16
SIZES = (1, 4, 8, 16)
"""So many rows meet every variant that a tuned shape has."""


class Shape(NamedTuple):
    """Times 16 outputs of a program; its warps, between which chunks are shared out. Powers of two."""

    tiles: int
    warps: int


SHAPES = [Shape(tiles, warps) for tiles in (1, 2) for warps in (1, 2, 4, 8, 16)]


def default_shape(outputs: int, inputs: int, device: torch.device) -> Shape:
    """A shape that gives every multiprocessor some warps, and these several chunks."""
    tiles = 2 if outputs >= 64 * pdl.multiprocessors(device) else 1
    chunks, warps = triton.cdiv(inputs, CHUNK), 1
    while warps < 8 and 2 * warps <= chunks:
        warps *= 2
    return Shape(tiles, warps)


def kind_of(weight: PackedWeight) -> str:
    """What the tuner tells weights apart by, beside their sizes."""
    way = "zeros" if weight.zeros is not None else "minima" if weight.minima is not None else "symmetric"
    return f"{way}, groups of {min(weight.group, CHUNK)}"


@tables.remembered
def shape_for(rows: int, outputs: int, inputs: int, kind: str) -> Shape | None:
    """The shape that was measured to be faster than what kernels/packed_gemm does; None where none was."""
    key = outputs, inputs, kind
    tables.ask(OP, key)
    choices = [(over, to, Shape(*shape)) for over, to, shape in tables.products(OP).get(key, [])]
    return tables.for_rows(choices, rows)


def takes(weight: PackedWeight) -> bool:
    """4 bits that stand for integers; no group has a part of a plane, or of a half of a chunk and of the other one."""
    return weight.bits == 4 and weight.table is None and (weight.group in (32, 64) or weight.group % 128 == 0)
