"""Experts of a layer for the tuner: the plan that is taken without a measurement, beside those that other layers were measured to want.

A run is a whole layer, gate, up and down, with several choices of experts one behind the other, so that weights come from memory.
There are too many pairs of tiles to try all at a start (grouped_gemm/tune.py does, for tables of the tree): candidates are plans of
tables, of about so many rows, and the rules' own of other kinds and numbers of rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from meshlm.kernels import tables
from meshlm.kernels.grouped_gemm import plan
from meshlm.kernels.grouped_gemm import tune as grouped_tune
from meshlm.kernels.grouped_gemm.plan import PARTS_ROWS, Layer, Plan
from meshlm.kernels.moe_few.kernel import MOST_ROWS
from meshlm.kernels.tuning.core import PLAIN, Case, Config, Run, Setting, Ways

SIZES = [1, 64, 16, 256, 1024]
ALL_SIZES = [1, 64, 16, 256, 1024, 2, 4, 8, 32, 96, 128, 512, 2048, 4096, 8192]
NEAR_ROWS = 4  # plans of tables for up to so many times the rows, or so many times fewer
ROOM = 0.5  # of the memory that is free: for random weights of one layer


def sizes(layer: Layer, device: torch.device, *, full: bool) -> list[int]:
    """Numbers of rows to measure; none where there is no room for another layer's weights."""
    if layer.topk > layer.experts:  # of a rank: how many of a token's experts are its own is not known
        return []
    weights = 2 * 3 * layer.experts * layer.hidden * layer.wide
    if device.type == "cuda" and weights > ROOM * torch.cuda.mem_get_info(device)[0]:
        return []
    return ALL_SIZES if full else SIZES


def candidates(layer: Layer, rows: int, *, most: int) -> list[Plan]:
    """The plan of the rules first; no more than `most` others."""
    usual = plan.usual_plan(rows, layer)
    others = dict.fromkeys([*_of_tables(rows), *_of_rules(layer, rows)])
    others.pop(usual, None)
    return [usual, *(each for each in others if _fits(each, rows))][: most + 1]


def _of_tables(rows: int) -> Iterator[Plan]:
    """Of all layers that a table knows, those for the nearest numbers of rows first."""
    known = [entry for choices in plan.known_plans().values() for entry in choices]

    def distance(to: int) -> float:
        return max(to / rows, rows / to)

    for _, to, found in sorted(known, key=lambda entry: distance(entry[1])):
        if distance(to) <= NEAR_ROWS:
            yield found


def _of_rules(layer: Layer, rows: int) -> Iterator[Plan]:
    for factor in (0.5, 2, 0.25, 4):
        yield plan.usual_plan(max(2, int(rows * factor)), layer)


def _fits(each: Plan, rows: int) -> bool:
    """Whether its kernels take so many rows."""
    return rows == 1 if each.kind == "one" else rows <= MOST_ROWS if each.kind == "few" else rows > 1


def ways(case: Case, setting: Setting, most: int) -> Ways:
    """The usual plan, and no more than `most` others, as the tuner's tables have them: numbers alone."""
    layer = Layer(*case.key)
    runs = Runs(layer, case.rows, setting.device, setting.dtype)
    usual, *others = candidates(layer, case.rows, most=most)
    found: dict[Config, Run] = {PLAIN: lambda _: runs.of(usual)}
    for each in others:
        found[plan.encoded(each)] = lambda _, each=each: runs.of(each)  # type: ignore[misc]
    return Ways([torch.empty(0, device=setting.device)], found)


class Runs:
    """One layer's runs, which share random weights and tokens."""

    def __init__(self, layer: Layer, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        self._bench, self._rows = grouped_tune.Bench(layer, rows, device, dtype), rows

    def of(self, each: Plan) -> Tensor:
        """What the last choice of experts gives, float32 or bfloat16 [rows, hidden]."""
        bench = self._bench
        bench.gate(each.kind, each.gate)()
        bench.down_run(each.kind, each.down)()
        in_parts = each.kind != "one" and self._rows <= PARTS_ROWS
        return bench.parts.sum(0) if in_parts else bench.whole


assert tables.KEYS[-1 - len(Layer._fields) : -1] == Layer._fields  # before a format
