"""How experts with packed weights are computed for so many rows: with which kernel, in which tiles. Without Gluon, which takes long to
import.

On an H200 one row takes as long as bytes are on their way: tiles of little shared memory with many stages are read the fastest.
direct.py takes the place of kernel.py where the tuner of a start has measured that it is faster. Of many rows the tuner compares tiles
of kernel.py: in tiles of 256 rows a weight is decoded half as often.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from meshlm.kernels import tables
from meshlm.kernels.grouped_gemm.plan import PARTS_ROWS, Layer
from meshlm.kernels.moe_align.kernel import counted_at_once
from meshlm.kernels.packed_experts.kernel import LEAST_ROWS, Shape
from meshlm.kernels.packed_experts.layout import MXFP4, ExpertWeight

OP = "packed_experts"  # direct.py, beside kernel.py
MANY_OP = "packed_experts_many"  # kernel.py's tiles of many rows
MANY = 96  # rows of an expert, on average: of more the tuner compares tiles
USUAL = (0, 0, 0)  # in a table: kernel.py computes it

FEW_ROWS = 16  # of more, sorted rows take less time
DIRECT_ROWS = 16  # that direct.py computes unsorted
MOST_SCALE = 128  # of MXFP4 in direct.py, as e8m0: 2


class DirectShape(NamedTuple):
    """Times 16 lines of the weight that a program of direct.py has (of a gate half as many of up's); its warps (powers of two); turns
    of its loop whose weights are asked for ahead."""

    tiles: int
    warps: int
    depth: int = 1


class Direct(NamedTuple):
    """Shapes of direct.py; None: kernel.py computes it."""

    gate: DirectShape
    down: DirectShape | None


def takes(weight: ExpertWeight, dtype: torch.dtype) -> bool:
    """Whether direct.py computes with this weight and activations of this dtype. Waits for the device.

    Times 2^126 a scale of MXFP4 must be a bfloat16."""
    bits, group, values = weight.format
    if values == "mxfp4":
        return dtype == torch.bfloat16 and bool((weight.scales <= MOST_SCALE).all())
    halves = torch.float16, torch.bfloat16
    plain = bits == 4 and values in ("integers", "minima") and weight.order is None
    return plain and group > 16 and dtype in halves and weight.scales.dtype in halves


def kind_of(gate_up: ExpertWeight, down: ExpertWeight) -> str:
    """The name by which the tuner tells layers of the same sizes apart."""
    return " and ".join(dict.fromkeys((gate_up.format.name, down.format.name)))


class Plan(NamedTuple):
    """kind: few or many, as in kernel.py. Gate and down have the same block_m: rows are sorted once for both. direct: by direct.py, of
    sorted rows in tiles of block_m."""

    kind: str
    gate: Shape
    down: Shape
    direct: Direct | None = None

    @property
    def block_m(self) -> int:
        return self.gate.block_m


@tables.remembered
def plan_for(rows: int, layer: Layer, kind: str, *, direct: bool) -> Plan:
    """kind: `kind_of` the weights. direct: whether direct.py may compute it."""
    if direct:
        tables.note_use(OP, (*layer, kind))
        found = tables.for_rows(_table(layer, kind), rows)
        if found is not None:
            return found
    if rows * layer.topk > MANY * layer.experts:
        tables.note_use(MANY_OP, (*layer, kind))
        found = _of_many(rows, _table_of_many(layer, kind))
        if found is not None:
            return found
    return usual_plan(rows, layer, kind)


@tables.remembered
def _table(layer: Layer, kind: str) -> list[tuple[int, int, Plan]]:
    return [(over, to, decoded(numbers, kind)) for over, to, numbers in tables.products(OP).get((*layer, kind), [])]


@tables.remembered
def _table_of_many(layer: Layer, kind: str) -> list[tuple[int, int, Plan]]:
    return [(over, to, decoded_many(numbers)) for over, to, numbers in tables.products(MANY_OP).get((*layer, kind), [])]


def _of_many(rows: int, choices: list[tuple[int, int, Plan]]) -> Plan | None:
    """The tuner's choice; for more rows than were measured, its choice for the most."""
    return tables.for_rows(choices, min(rows, max((to for _, to, _ in choices), default=rows)))


def decoded_many(numbers: Sequence[Any]) -> Plan:
    """A plan of the tuner's tables for many rows: the shapes of gate and of down."""
    return Plan("many", Shape(*numbers[:4]), Shape(*numbers[4:]))


def candidates_of_many() -> list[tuple[int, ...]]:
    """Plans for many rows that the tuner tries, encoded, the likeliest first."""
    return [*((256, 64, 8, stages, 256, 128, 8, stages) for stages in (3, 2)), (128, 64, 4, 3, 128, 64, 4, 2)]


def usual_plan(rows: int, layer: Layer, kind: str) -> Plan:
    """The plan that is taken without a measurement."""
    if rows <= FEW_ROWS:
        if kind != MXFP4.name:
            return Plan("few", Shape(FEW_ROWS, 64, 4, 4), Shape(FEW_ROWS, 128, 4, 4))
        return Plan("few", Shape(FEW_ROWS, 32, 4, 8), Shape(FEW_ROWS, 64, 4, 8))
    return Plan("many", *_tiles(rows * layer.topk / layer.experts, kind))


def decoded(numbers: Sequence[Any], kind: str = MXFP4.name) -> Plan:
    """A plan of the tuner's tables: rows of a tile, 0 if they are not sorted; tiles, warps and depth of gate, and of down or USUAL."""
    block_m, *shape = numbers
    tiles = _tiles(12 if block_m <= LEAST_ROWS else 32, kind)
    down = tuple(shape[3:])
    return Plan(
        "many" if block_m else "few",
        *tiles,
        Direct(DirectShape(*shape[:3]), None if down == USUAL else DirectShape(*down)),
    )


def candidates(rows: int, layer: Layer, kind: str) -> list[tuple[int, ...]]:
    """Plans of direct.py that the tuner tries, encoded, the likeliest first."""
    block_m = 16 if rows * layer.topk / layer.experts <= 12 else 32
    if kind != MXFP4.name:
        gates, downs = [(2, 2, 1), (1, 4, 3)], [(2, 1, 4), (2, 2, 2), (1, 2, 2)]
        return [(0 if rows <= DIRECT_ROWS else block_m, *gate, *down) for down in downs for gate in gates]
    if rows <= 4:
        gates, downs = [(1, 4, 3), (2, 2, 1), (1, 2, 2)], [(2, 4, 1), (1, 4, 3), (1, 2, 2)]
        return [(0, *gate, *down) for gate in gates for down in downs]
    pairs = [
        ((2, 2, 1), USUAL),
        ((2, 2, 1), (2, 2, 1)),
        ((4, 2, 1), (2, 2, 1)),
        ((2, 4, 1), (2, 4, 1)),
        ((1, 2, 1), USUAL),
        ((1, 2, 1), (2, 2, 1)),
    ]
    heights = [0] if rows <= DIRECT_ROWS else []
    heights.append(block_m)
    return [(height, *gate, *down) for gate, down in pairs for height in heights]


def _tiles(each: float, kind: str) -> tuple[Shape, Shape]:
    """each: rows that an expert has on average. As measured with gpt-oss' layer, and of integers with Qwen3-30B-A3B's."""
    integers = kind != MXFP4.name
    if each <= 32:
        block_m, stages = (LEAST_ROWS, 8) if each <= 12 else (32, 6)
        if integers:
            return Shape(block_m, 64, 4, 4), Shape(block_m, 128, 4, 3)
        return Shape(block_m, 32, 4, stages), Shape(block_m, 64, 4, stages)
    if each <= 96:
        return Shape(64, 64, 4, 4), Shape(64, 128, 8 if integers else 4, 3)
    if integers:
        return Shape(128, 64, 4, 3), Shape(128, 64, 4, 2)
    return Shape(128, 128, 8, 3), Shape(128, 128, 8, 3)


def warm_rows(layer: Layer, most: int, kind: str, *, direct: bool) -> set[int]:
    """So many rows, up to `most`, meet every variant of the kernels that steps may use."""
    seen, found = set(), set()
    for rows in range(1, most + 1):
        plan = plan_for(rows, layer, kind, direct=direct)
        entries = rows * layer.topk
        variant: tuple[object, ...] = plan, rows <= PARTS_ROWS, counted_at_once(entries)
        if plan.kind == "few":
            least = LEAST_ROWS if plan.direct is None else 8
            variant = plan, entries <= layer.experts, max(least, 1 << (rows - 1).bit_length())
        if variant not in seen:
            seen.add(variant)
            found.add(rows)
    return found
