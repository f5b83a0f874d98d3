"""How the experts of a layer are computed for so many rows: with which kernels, in which tiles.

    one     kernels/moe_gemv: one row
    few     kernels/moe_few: up to a tile of rows, not sorted
    many    kernels/moe_align and grouped_gemm: sorted rows

As a tuner found it for this processor and these sizes; other sizes get tiles that fit the rows that an expert has on average.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from meshlm.kernels import tables
from meshlm.kernels.grouped_gemm import kernel as many
from meshlm.kernels.moe_align.kernel import counted_at_once
from meshlm.kernels.moe_few import kernel as few
from meshlm.kernels.moe_gemv import kernel as one

PARTS_ROWS = 128  # of more the norm behind would read more than a sum by a kernel of its own costs
MOST_INPUTS = 8192  # of a gemv: a program keeps a row of them
SHORT_LINE = 2048  # inputs


class Layer(NamedTuple):
    """Sizes of a layer's experts on one rank."""

    experts: int
    topk: int
    hidden: int
    wide: int


class Plan(NamedTuple):
    """Shapes are those of the kernel that `kind` names."""

    kind: str
    gate: one.Shape | few.Shape | many.Shape
    down: one.Shape | few.Shape | many.Shape


SHAPES: dict[str, type[one.Shape] | type[few.Shape] | type[many.Shape]] = {
    "one": one.Shape,
    "few": few.Shape,
    "many": many.Shape,
}
Entry = tuple[int, int, Plan]  # rows above, up to, and the plan
WIDEST = len(many.Shape._fields)  # numbers of a shape, at most
KINDS = tuple(SHAPES)


def known_plans() -> dict[Layer, list[Entry]]:
    """The entries of this processor's table; without a GPU the fallback's."""
    table = tables.alike("grouped_gemm") if torch.cuda.is_available() else tables.read("grouped_gemm")
    return {
        Layer(*(each[name] for name in Layer._fields)): [
            (over, to, Plan(kind, SHAPES[kind](*gate), SHAPES[kind](*down)))
            for over, to, kind, gate, down in each["rows"]
        ]
        for each in (table or {"layers": []})["layers"]
    }


def encoded(plan: Plan) -> tuple[int, ...]:
    """The plan as numbers, for the tuner's tables: its kind and both shapes, each filled up with -1."""
    shapes = ([*map(int, shape), *[-1] * (WIDEST - len(shape))] for shape in (plan.gate, plan.down))
    return (KINDS.index(plan.kind), *(number for shape in shapes for number in shape))


def decoded(numbers: Sequence[int]) -> Plan:
    kind = KINDS[numbers[0]]
    gate, down = (_shape(kind, numbers[begin : begin + WIDEST]) for begin in (1, 1 + WIDEST))
    return Plan(kind, gate, down)


def _shape(kind: str, numbers: Sequence[Any]) -> one.Shape | few.Shape | many.Shape:
    make = SHAPES[kind]
    found = make(*numbers[: len(make._fields)])
    return found._replace(flat=bool(found.flat), apart=bool(found.apart)) if isinstance(found, many.Shape) else found


@tables.remembered
def _table() -> dict[Layer, list[Entry]]:
    """Without a table of this processor what the tuner has found alone."""
    found = {
        Layer(*key): [(over, to, decoded(config)) for over, to, config in entry["rows"]]
        for key, entry in tables.all_added("grouped_gemm").items()
    }
    return {**found, **(known_plans() if torch.cuda.is_available() else {})}


@tables.remembered
def plan_for(rows: int, layer: Layer, *, apart: bool = True, one_row: bool = True) -> Plan:
    """apart: whether hopper.py may compute it (`many.has_apart`). one_row: whether moe_gemv may, which has no epilogue."""
    if one_row:
        tables.note_use("grouped_gemm", tuple(layer))
    found = tables.for_rows(_table().get(layer, []), rows)
    if found is None or (not apart and is_apart(found)) or (not one_row and found.kind == "one"):
        return usual_plan(rows, layer, one_row=one_row)
    return found


def is_apart(plan: Plan) -> bool:
    return any(isinstance(shape, many.Shape) and shape.apart for shape in (plan.gate, plan.down))


def usual_plan(rows: int, layer: Layer, *, one_row: bool = True) -> Plan:
    """The plan that is taken without a measurement. one_row: as in `plan_for`."""
    if rows == 1 and one_row and max(layer.hidden, layer.wide) <= MOST_INPUTS:
        return one_row_plan(layer)
    each = rows * layer.topk / layer.experts
    sorts = rows > 16 and each <= 12  # of many small experts each has a tile of 16 sorted rows
    if rows <= few.MOST_ROWS and not sorts:
        wide_tile, deep = few.Shape(64, 64, 4, 5), few.Shape(64, 128, 4, 3)
        return Plan("few", few.Shape(32, 128, 4, 5), deep) if rows <= 16 else Plan("few", wide_tile, wide_tile)
    if each <= 32:
        block_m = 16 if each <= 12 else 32
        gate, down = many.Shape(block_m, 64, 128, 4, 3, programs=2), many.Shape(block_m, 128, 128, 4, 3, programs=2)
        return Plan("many", gate, down)
    if each <= 96:
        return Plan("many", many.Shape(64, 64, 64, 4, 4), many.Shape(64, 128, 64, 4, 4))
    return Plan("many", many.Shape(128, 128, 64, 8, 3), many.Shape(128, 256, 64, 8, 3))


def one_row_plan(layer: Layer) -> Plan:
    """Short lines one by one in many programs, as whole steps of Qwen3-30B-A3B chose; of longer ones eight programs have no room."""
    if layer.hidden <= SHORT_LINE:
        return Plan("one", one.Shape(1, 1, 2, 8), one.Shape(4, 4))
    return Plan("one", one.Shape(2, 4, 3, 2), one.Shape(2, 4))


def fp8_plan(rows: int, layer: Layer, block_k: int) -> Plan:
    """The plan for weights of 8-bit floats, without a measurement. block_k: inputs that have a scale together, or of tiles."""
    if rows <= few.MOST_ROWS:
        return Plan("few", few.Shape(32, block_k, 4, 4), few.Shape(64, block_k, 4, 3))
    each = rows * layer.topk / layer.experts
    block_m = 16 if each <= 12 else 32 if each <= 32 else 64 if each <= 96 else 128
    warps, programs = (8, 1) if block_m == 128 else (4, 2 if block_m < 64 else 1)
    return Plan(
        "many",
        many.Shape(block_m, 64, block_k, warps, 3, programs=programs),
        many.Shape(block_m, 128, block_k, warps, 3, programs=programs),
    )


INVARIANT = Plan("many", many.Shape(64, 64, 64, 4, 4), many.Shape(64, 128, 64, 4, 4))
"""For any number of rows, each of which gets the same bits whatever the others are: one variant of each kernel, in tiles of 64 rows,
which Hopper multiplies by wgmma."""


def warm_rows_of(num_topk: int, most: int) -> set[int]:
    """So many rows, up to `most`, meet every variant of the kernels that order rows for INVARIANT."""
    found: dict[int, int] = {}
    for rows in range(1, most + 1):
        found.setdefault(counted_at_once(rows * num_topk), rows)
    return set(found.values())


def leaves_parts(plan: Plan, rows: int) -> bool:
    """Whether results are left as parts, where somebody sums them up."""
    return plan.kind != "one" and rows <= PARTS_ROWS


def warm_rows(layer: Layer, most: int, block_k: int = 0, *, apart: bool = True, one_row: bool = True) -> set[int]:
    """So many rows, up to `most`, meet every variant of the kernels that steps may use. block_k: as in `fp8_plan`, or 0; apart and
    one_row: as in `plan_for`."""
    seen, found = set(), set()
    for rows in range(1, most + 1):
        plan = fp8_plan(rows, layer, block_k) if block_k else plan_for(rows, layer, apart=apart, one_row=one_row)
        variant = (
            (plan, rows * layer.topk <= layer.experts, max(16, 1 << (rows - 1).bit_length()))
            if plan.kind == "few"
            else (plan, leaves_parts(plan, rows), counted_at_once(rows * layer.topk))
        )
        if variant not in seen:
            seen.add(variant)
            found.add(rows)
    return found
