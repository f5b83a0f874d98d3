"""Tiles of a decode step of one request, chosen by what the whole step takes; kept in the kernels' tables of this GPU.

    python -P benchmarks/tune_step.py MODEL [--tp 1] [--context 576] [--passes 3] [--minutes 60] [--json FILE] [--dry]

As kernels/tuning/steps.py says: tiles that are the best alone (kernels/gemv/tune.py, attention/tune.py) are only the beginning;
attention, then one product after the other, and experts' tries its tiles' neighbours, and the best stays. `meshlm tune MODEL` does that
for products that no table of the tree has. Dummy weights. --tp: the products of one of so many ranks, on one GPU (echo.py).
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from meshlm.kernels import tables
from meshlm.kernels.attention.tiles import MAX_SPLITS, MEASURED_DIM, SHORT_CONTEXT, decode_tiles
from meshlm.kernels.gemv import kernel as gemv
from meshlm.kernels.grouped_gemm import plan as experts
from meshlm.kernels.grouped_gemm import tune as experts_tune
from meshlm.kernels.measure import keep
from meshlm.kernels.moe_gemv import kernel as one
from meshlm.kernels.tuning import steps
from meshlm.kernels.tuning.steps import Tile
from meshlm.workers.attention import triton_backend
from meshlm.workers.engine.timed_steps import TimedSteps
from meshlm.workers.engine.triton_inputs import TritonInputs
from meshlm.workers.moe.experts import triton as triton_experts

sys.path.insert(0, str(Path(__file__).parent))
import echo
import engine_step

DECODE = "decode"
EXPERTS = {"expert gate": "gate", "expert down": "down"}
Choice = dict[Any, Tile]  # by (outputs, inputs, gate, way), DECODE and those of EXPERTS


def near_decode(tile: Tile) -> list[Tile]:
    """The same of parts, keys, warps, stages."""
    parts, keys, warps, stages = tile
    found = {(parts, keys, warps, stages + 1), (parts, keys, warps, stages - 1)}
    for by in (2, 0.5):
        found |= {(int(parts * by), keys, warps, stages)}
        found |= {(parts, int(keys * by), warps, stages), (parts, keys, int(warps * by), stages)}
        found |= {(parts, int(keys * by), int(warps * by), stages)}
    limits = ((1, 32), (16, 128), (1, 8), (2, 4))
    return sorted(
        t for t in found - {tile} if all(low <= size <= high for size, (low, high) in zip(t, limits, strict=True))
    )


def near_down(tile: Tile) -> list[Tile]:
    """The same of an expert's down projection, which has rows and warps alone."""
    return sorted({(*near[:2], *tile[2:]) for near in steps.near(tile)} - {tile})


NEAR: dict[object, Callable[[Tile], list[Tile]]] = {DECODE: near_decode, "expert down": near_down}


class Step:
    """A decode step of one request, of which tiles can be chosen."""

    def __init__(self, model: str, context: int, ranks: int = 1) -> None:
        self._choice: Choice = {}
        self._seen: dict[tuple[int, int, bool, str], Tile] = {}
        self._usual = gemv.shape_of
        gemv.shape_of = self._shape_of  # type: ignore[assignment]
        triton_backend.decode_tiles = self._decode_tiles  # type: ignore[assignment,attr-defined]
        triton_experts.plan_for = self._plan_for  # type: ignore[assignment,attr-defined]
        self.layer: experts.Layer | None = None  # of experts that one row has a kernel for
        placement = echo.EchoPlacement(ranks) if ranks > 1 else None
        flags = ["--tune", "off", *(["--max-num-seqs", "8"] if placement else [])]
        self.engine = engine_step.make_engine(model, flags, placement)
        prompt = engine_step.prompts(1, context, self.engine.facts.block_size, 64, self.engine.facts.kv_specs)
        self.engine.step(prompt, 0).wait()
        self.engine.step(engine_step.decodes(1, context), 0).wait()
        assert isinstance(self.engine.inputs, TritonInputs)
        self._timed = TimedSteps(self.engine, self.engine.inputs, self.engine.graphs._capture, 0, context)
        longest = self.engine.rows.block_tables.shape[-1] * self.engine.facts.block_size
        longest = min(longest, SHORT_CONTEXT) if context <= SHORT_CONTEXT else longest  # as its graph is launched
        device, spec = self.engine.device, self.engine.spec
        self.group = spec.num_attention_heads // spec.num_key_value_heads
        self.start: Choice = dict(self._seen)
        if ranks == 1:  # the attention of a rank's few heads is not what the table's entries tell apart
            usual = decode_tiles(spec.num_key_value_heads, longest, device, self.group, spec.head_dim)
            self.start = {DECODE: usual, **self.start}
        if self.layer is not None:
            plan = experts.plan_for(1, self.layer)
            self.start |= {name: tuple(getattr(plan, which)) for name, which in EXPERTS.items()}

    def _shape_of(self, outputs: int, inputs: int, gate: bool, way: str = "", size: int = 2) -> Tile:
        """See `meshlm.kernels.gemv.kernel.shape_of`."""
        chosen = self._choice.get((outputs, inputs, gate, way)) or self._usual(outputs, inputs, gate, way, size)
        self._seen[outputs, inputs, gate, way] = chosen
        return chosen

    def _plan_for(self, rows: int, layer: experts.Layer, **allowed: bool) -> experts.Plan:
        plan = experts.plan_for(rows, layer, **allowed)
        if plan.kind != "one":
            return plan
        self.layer, known = layer, self._choice
        chosen: dict[str, Any] = {which: one.Shape(*known[name]) for name, which in EXPERTS.items() if name in known}
        return plan._replace(**chosen)

    def _decode_tiles(self, programs: int, longest: int, device: torch.device, group: int, dim: int) -> Tile:
        return self._choice.get(DECODE) or decode_tiles(programs, longest, device, group, dim)

    def timed(self, choices: list[Choice]) -> list[float]:
        """Microseconds of the step with each, medians, in turns."""
        return self._timed(choices, self._use)

    def _use(self, choice: Choice) -> None:
        self._choice = choice


def descend(step: Step, passes: int, until: float = math.inf) -> tuple[Choice, list[dict[str, Any]]]:
    """One size after the other, until nothing is gained or time.monotonic() is `until`, with what was found by then."""
    report: list[dict[str, Any]] = []

    def note(number: int, name: object, usual: float, best: float, tile: Tile) -> None:
        line = {"pass": number, "kernel": str(name), "step_us": round(usual, 1), "best_us": round(best, 1)}
        report.append({**line, "tile": tile})
        print(json.dumps(report[-1]), flush=True)

    chosen = steps.descend(
        step.start, step.timed, passes=passes, is_over=lambda: time.monotonic() >= until,
        near_of=lambda name: NEAR.get(name, steps.near), note=note,
    )  # fmt: skip
    return chosen, report


def untuned() -> list[str]:
    """Operations without a table of this GPU: what is found here only adds to one."""
    return [op for op in ("gemv", "attention") if tables.own(op) is None]


def lone(known: list[dict[str, Any]], parts: int) -> dict[str, Any] | None:
    """Where an entry of attention is for requests that are as alone as the one of the step, whose context has so many parts.

    None if it is not split at all: what suits one request need not suit many, and nothing would tell them apart.
    """
    usual = next((entry for entry in known if "splits_from" in entry), {"splits_from": MAX_SPLITS})
    where = {"splits_from": min(usual["splits_from"], parts), "longest_to": usual.get("longest_to", SHORT_CONTEXT)}
    return where if parts > 1 else None


def write(
    chosen: Choice, group: int, layer: experts.Layer | None = None, usual_parts: int = 0, dim: int = MEASURED_DIM
) -> None:
    """Into the tables: of gemv by exact sizes; of attention for lone requests, by how many query heads a kv head has, up to these, and
    for large heads from their numbers on; of a layer's experts for one row. usual_parts: of the context, without a choice."""
    if layer is not None:
        plan = experts.Plan("one", *(one.Shape(*chosen[name]) for name in EXPERTS))
        experts_tune.write(layer, {1: plan})
    table = dict(tables.own("gemv") or {})
    kept = {tuple(each.get(name, "") for name in gemv.EXACT): each for each in table.get("in_steps", [])}
    for name, tile in chosen.items():
        if name != DECODE and name not in EXPERTS:
            entry = dict(zip(gemv.EXACT, name, strict=True))
            kept[name] = {**{key: value for key, value in entry.items() if value != ""}, "tile": list(tile)}
    tables.write("gemv", {**_values(table), "in_steps": [kept[name] for name in sorted(kept)]})
    if DECODE not in chosen:
        return
    table = dict(tables.own("attention") or {})
    large = {"dim_from": dim} if dim > MEASURED_DIM else {}
    others = [entry for entry in table["decode"] if _heads(entry) != _heads({"group_to": group, **large})]
    parts, *tile_of_part = chosen[DECODE]
    where = lone([entry for entry in others if "group_to" not in entry], max(parts, usual_parts))
    if where is None:
        print("attention: a lone request's context is not split; its tiles stay", flush=True)
        return
    fewer = {"splits_to": parts} if parts < usual_parts else {}
    sizes = dict(zip(("block_n", "warps", "stages"), tile_of_part, strict=True))
    mine = {**where, **fewer, **sizes, "group_to": group, **large}
    known = sorted([mine, *(entry for entry in others if "group_to" in entry)], key=_heads)
    table["decode"] = known + [entry for entry in others if "group_to" not in entry]
    tables.write("attention", _values(table))


def _heads(entry: dict[str, Any]) -> tuple[int, int]:
    """What heads an entry is for, in the order in which a table has them: large ones first."""
    return -int(entry.get("dim_from", 0)), int(entry.get("group_to", 0))


def _values(table: tables.Table) -> tables.Table:
    """All but what `tables.write` adds."""
    return {key: value for key, value in table.items() if key not in ("gpu", "torch", "triton")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, default=1, help="ranks, of which one is tuned")
    parser.add_argument("--context", type=int, default=576)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60.0, help="to search for; the size under way is finished")
    parser.add_argument("--json")
    parser.add_argument("--dry", action="store_true", help="write no table")
    arguments = parser.parse_args()
    if not arguments.dry and (ops := untuned()):
        parser.error(
            f"no table of this GPU for {', '.join(ops)}: run python -P -m meshlm.kernels.{ops[0]}.tune, or --dry"
        )
    until = time.monotonic() + 60 * arguments.minutes
    step = Step(arguments.model, arguments.context, arguments.tp)
    chosen, report = descend(step, arguments.passes, until)
    before, after = step.timed([step.start, chosen])
    print(f"step {before:.1f} -> {after:.1f} us: {chosen}", flush=True)
    if not arguments.dry:
        write(chosen, step.group, step.layer, step.start.get(DECODE, (0,))[0], step.engine.spec.head_dim)
    facts = {"model": Path(arguments.model).name, "tp": arguments.tp, "context": arguments.context}
    keep(report, arguments.json, **facts, before_us=round(before, 1), after_us=round(after, 1))


if __name__ == "__main__":
    main()
