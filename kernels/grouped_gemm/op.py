"""The record of a layer's experts, gate, up and down, and the plans that a start tries for them: the plan that is taken without a
measurement, beside those that other layers were measured to want.

There are too many pairs of tiles to try all at a start: candidates are plans of tables, of about so many rows, and the rules' own of
other kinds and numbers of rows. Several choices of experts stand one behind the other, so that weights come from memory.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshlm.kernels.grouped_gemm import kernel as many
from meshlm.kernels.grouped_gemm import plan, reference
from meshlm.kernels.grouped_gemm.plan import PARTS_ROWS, Layer, Plan
from meshlm.kernels.moe_align.kernel import align, most_tiles
from meshlm.kernels.moe_few import kernel as few
from meshlm.kernels.moe_gemv import kernel as one
from meshlm.kernels.moe_sum.kernel import weighted_sum
from meshlm.kernels.op import Launch, Op
from meshlm.kernels.tuning import core
from meshlm.kernels.tuning.core import PLAIN, Setting, Ways

SIZES = [1, 64, 16, 256, 1024]
ALL_SIZES = [1, 64, 16, 256, 1024, 2, 4, 8, 32, 96, 128, 512, 2048, 4096, 8192]
NEAR_ROWS = 4  # plans of tables for up to so many times the rows, or so many times fewer
ROOM = 0.5  # of the memory that is free: for random weights of one layer
BYTES_AT_ONCE = 400 << 20  # of weights that a run reads, at least: many times the L2 cache


class Tokens(NamedTuple):
    """Tokens and their experts."""

    x: Tensor
    experts: Tensor
    weights: Tensor


class Experts:
    """One layer's experts with random weights, and tokens for it that choose at random."""

    def __init__(self, layer: Layer, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        self.layer, self._rows = layer, rows
        make: dict[str, Any] = {"device": device, "dtype": dtype}
        count, topk, hidden, wide = layer
        copies = max(1, min(16, BYTES_AT_ONCE // (2 * min(count, rows * topk) * hidden * wide)))
        self.gate_up = torch.randn(count, 2 * wide, hidden, **make) * hidden**-0.5
        self.down = torch.randn(count, hidden, wide, **make) * wide**-0.5
        self.tokens = [
            Tokens(
                torch.randn(rows, hidden, **make),
                torch.rand(rows, count, device=device).topk(topk, dim=1).indices.to(torch.int32),
                torch.rand(rows, topk, device=device),
            )
            for _ in range(copies)
        ]
        most = max(rows * topk, most_tiles(rows * topk, count, 128) * 128)
        self._inner, self._out = torch.randn(most, wide, **make), torch.empty(most, hidden, **make)
        self._parts = torch.empty(topk, min(rows, PARTS_ROWS), hidden, device=device)
        self._whole = torch.empty(rows, hidden, **make)

    def run(self, chosen: Plan) -> Tensor:
        """The output of the last choice of experts, float32 or of the dtype, [rows, hidden]."""
        for tokens in self.tokens:
            self._gate(chosen, tokens)
        for tokens in self.tokens:
            self._down(chosen, tokens)
        return self._parts.sum(0) if chosen.kind != "one" and self._rows <= PARTS_ROWS else self._whole

    def _gate(self, chosen: Plan, tokens: Tokens) -> None:
        (x, experts, _), shape, topk = tokens, chosen.gate, self.layer.topk
        if isinstance(shape, one.Shape):
            one.gate_gemv(x, self.gate_up, experts, self._inner[:topk], shape)
        elif isinstance(shape, few.Shape):
            few.few(x, self.gate_up, experts, None, self._inner[: len(x) * topk], shape)
        else:
            ids, _, ends, owners = align(experts, self.layer.experts, shape.block_m)
            given = shape, ends, ids, topk, experts.numel()
            many.sorted_gemm(x, self.gate_up, self._inner[: len(ids)], *given, gate=True, owners=owners)

    def _down(self, chosen: Plan, tokens: Tokens) -> None:
        (x, experts, weights), shape, topk = tokens, chosen.down, self.layer.topk
        if isinstance(shape, one.Shape):
            one.down_gemv(self._inner[:topk], self.down, experts, weights, self._whole, shape)
            return
        if isinstance(shape, few.Shape):
            few.few(self._inner[: len(x) * topk], self.down, experts, weights, self._parts, shape)
            return
        ids, positions, ends, owners = align(experts, self.layer.experts, shape.block_m)
        inner, entries = self._inner[: len(ids)], experts.numel()
        if self._rows <= PARTS_ROWS:
            to = many.Parts(experts, weights)
            many.sorted_gemm(inner, self.down, self._parts, shape, ends, ids, topk, entries, parts=to)
            return
        out = self._out[: len(ids)]
        many.sorted_gemm(inner, self.down, out, shape, ends, entries=entries, owners=owners)
        weighted_sum(out, positions, weights, self._whole)

    def expected(self) -> Tensor:
        """The same by plain torch, float32."""
        x, experts, weights = self.tokens[-1]
        inner = reference.by_entry(x, self.gate_up, experts, gate=True)
        found = reference.by_entry(inner, self.down, experts).float().view(*experts.shape, -1)
        return (found * weights[..., None]).sum(1)


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
    """The shapes of all layers that a table knows, those for the nearest numbers of rows first."""
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
    return rows == 1 if each.kind == "one" else rows <= few.MOST_ROWS if each.kind == "few" else rows > 1


def ways(case: core.Case, setting: Setting, most: int) -> Ways:
    """The usual plan, and no more than `most` others, as the tuner's tables have them: numbers alone."""
    layer = Layer(*case.key)
    experts = Experts(layer, case.rows, setting.device, setting.dtype)
    usual, *others = candidates(layer, case.rows, most=most)
    found: dict[core.Config, core.Run] = {PLAIN: lambda _: experts.run(usual)}
    for each in others:
        found[plan.encoded(each)] = lambda _, each=each: experts.run(each)  # type: ignore[misc]
    return Ways([torch.empty(0, device=setting.device)], found)


def _make(dtype: torch.dtype, device: torch.device, layer: Layer, rows: int, chosen: Plan | None = None) -> Launch:
    """Bytes are those of the weights of experts that are touched."""
    experts, used = Experts(layer, rows, device, dtype), chosen or plan.plan_for(rows, layer)
    touched = sum(len(tokens.experts.unique()) for tokens in experts.tokens) / len(experts.tokens)
    size = 3 * layer.hidden * layer.wide
    return Launch(
        lambda: experts.run(used), experts.expected, touched * size * dtype.itemsize, 2 * rows * layer.topk * size,
        copies=len(experts.tokens),
    )  # fmt: skip


ONE = Plan("one", one.Shape(2, 4, 2, 2), one.Shape(4, 4))
FEW = Plan("few", few.Shape(16, 16, 4, 2), few.Shape(16, 16, 4, 2))
MANY = Plan("many", many.Shape(16, 16, 16, 4, 2, programs=2), many.Shape(16, 16, 16, 4, 2, programs=2))
TINY, QWEN3 = Layer(5, 2, 32, 16), Layer(128, 8, 2048, 768)
ROWS = [1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
OPS = (
    Op(
        "experts", _make, [(TINY, 1, ONE), (TINY, 5, FEW), (TINY, 5, MANY), (TINY, 130, MANY)],
        [(QWEN3, rows) for rows in ROWS], near=4,
    ),
)  # fmt: skip
