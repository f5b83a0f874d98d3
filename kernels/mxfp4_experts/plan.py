"""How experts with MXFP4 weights are computed for so many rows: with which kernel, in which tiles.

On an H200 one row takes as long as bytes are on their way: tiles of little shared memory with many stages are read the fastest.
"""

from typing import NamedTuple

from meshlm.kernels.grouped_gemm.plan import PARTS_ROWS
from meshlm.kernels.moe_align.kernel import counted_at_once
from meshlm.kernels.mxfp4_experts.kernel import LEAST_ROWS, Shape

FEW_ROWS = 16  # of more, sorted rows take less time


class Plan(NamedTuple):
    """kind: few or many, as in kernel.py. Gate and down have the same block_m: rows are sorted once for both."""

    kind: str
    gate: Shape
    down: Shape


def plan_for(rows: int, num_topk: int, num_experts: int) -> Plan:
    if rows <= FEW_ROWS:
        return Plan("few", Shape(FEW_ROWS, 32, 4, 8), Shape(FEW_ROWS, 64, 4, 8))
    return Plan("many", *_tiles(rows * num_topk / num_experts))


def batched_shapes(most: int) -> tuple[Shape, Shape]:
    """Tiles of gate and down where an expert has up to so many rows."""
    return _tiles(12 if most <= LEAST_ROWS else 32 if most <= 64 else 96 if most <= 512 else most)


def _tiles(each: float) -> tuple[Shape, Shape]:
    """each: rows that an expert has on average."""
    if each <= 32:
        block_m, stages = (LEAST_ROWS, 8) if each <= 12 else (32, 6)
        return Shape(block_m, 32, 4, stages), Shape(block_m, 64, 4, stages)
    if each <= 96:
        return Shape(64, 64, 4, 4), Shape(64, 128, 4, 3)
    return Shape(128, 128, 8, 3), Shape(128, 128, 8, 3)


def warm_rows(num_topk: int, num_experts: int, most: int) -> set[int]:
    """So many rows, up to `most`, meet every variant of the kernels that steps may use."""
    seen, found = set(), set()
    for rows in range(1, most + 1):
        plan = plan_for(rows, num_topk, num_experts)
        entries = rows * num_topk
        variant: tuple[object, ...] = plan, rows <= PARTS_ROWS, counted_at_once(entries)
        if plan.kind == "few":
            variant = plan, entries <= num_experts, max(LEAST_ROWS, 1 << (rows - 1).bit_length())
        if variant not in seen:
            seen.add(variant)
            found.add(rows)
    return found
