"""A step of decodes and prompts on the GPU engine alone, without the mesh: how long it takes, and on which kernels.

    python -P benchmarks/mixed_step.py MODEL [--step 64:3008 256:2816] [--context 1088] [--kernels] [--json FILE] [engine flags]

DECODES:TOKENS; each decode has a context, and the tokens are prompts of 1,024 at most. Two steps are in flight; `step_ms` is the median
of three runs. --kernels: microseconds of a step by kernel, and what the GPU stood still before each. Dummy weights.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.kv import KVSpec
from meshlm.protocol.wire.ids import StepId

LONGEST = 1024  # prompt
RESERVE = 64  # tokens that a row has room for behind its context
MOST = 8192  # tokens of a step that computes contexts
RUNS, STEPS, PROFILED = 3, 60, 5


def rows_of(decodes: int, tokens: int, context: int, block_size: int, specs: Sequence[KVSpec] = ()) -> list[NewRow]:
    """Decodes' first, then prompts of so many tokens together."""
    from engine_step import prompts

    counts = [min(LONGEST, tokens - done) for done in range(0, tokens, LONGEST)]
    rows = prompts(decodes + len(counts), max(context, *counts), block_size, RESERVE, specs).new_rows
    lengths = [context] * decodes + counts
    return [
        msgspec.structs.replace(row, token_ids=row.token_ids[: 4 * length], num_prompt_tokens=length)
        for row, length in zip(rows, lengths, strict=True)
    ]


def columns(rows: list[NewRow], starts: list[int], counts: list[int], new: list[NewRow]) -> StepPlan:
    packed = ([row.row for row in rows], starts, counts)
    numbers, first, each = (np.array(line, np.int32).tobytes() for line in packed)
    return StepPlan(1, StepId(1), numbers, first, each, b"", sum(counts), new_rows=new)


def contexts(rows: list[NewRow]) -> list[StepPlan]:
    """Steps that bring the rows and compute all their tokens."""
    plans: list[StepPlan] = []
    part: list[NewRow] = []
    for row in rows:
        if part and sum(one.num_prompt_tokens for one in (*part, row)) > MOST:
            plans.append(columns(part, [0] * len(part), [one.num_prompt_tokens for one in part], part))
            part = []
        part.append(row)
    return [*plans, columns(part, [0] * len(part), [one.num_prompt_tokens for one in part], part)]


def mixed(rows: list[NewRow], decodes: int) -> StepPlan:
    """The step: one token behind each context, and the prompts again."""
    prompts = [row.num_prompt_tokens for row in rows[decodes:]]
    starts = [row.num_prompt_tokens for row in rows[:decodes]] + [0] * len(prompts)
    return columns(rows, starts, [1] * decodes + prompts, [])


def run(engine: Any, plan: StepPlan, steps: int) -> float:
    """Milliseconds a step."""
    pending: deque[Any] = deque()
    begun = time.perf_counter()
    for _ in range(steps):
        pending.append(engine.step(plan, 0))
        if len(pending) == 2:
            pending.popleft().wait()
    while pending:
        pending.popleft().wait()
    return (time.perf_counter() - begun) / steps * 1e3


def kernels(engine: Any, plan: StepPlan) -> list[dict[str, Any]]:
    """The longest first."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(engine, plan, PROFILED)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return by_name([event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")])


def by_name(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sums up a trace's events by name: each has a name, a begin `ts` and a duration `dur` in microseconds."""
    found: dict[str, list[float]] = {}
    end: float | None = None
    for event in sorted(events, key=lambda event: event["ts"]):
        one = found.setdefault(event["name"][:70], [0, 0.0, 0.0])
        one[0] += 1
        one[1] += event["dur"]
        one[2] += max(0.0, event["ts"] - end) if end is not None else 0.0
        end = max(end or 0.0, event["ts"] + event["dur"])
    return [
        {
            "name": name,
            "per_step": count / PROFILED,
            "us_per_step": round(total / PROFILED, 1),
            "us": round(total / count, 2),
            "gap_before_us": round(gap / count, 2),
        }
        for name, (count, total, gap) in sorted(found.items(), key=lambda each: -each[1][1])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--step", nargs="+", default=["64:3008", "256:2816"], metavar="DECODES:TOKENS")
    parser.add_argument("--context", type=int, default=1088)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--json")
    arguments, extra = parser.parse_known_args()
    import torch
    from engine_step import make_engine

    steps = [tuple(map(int, step.split(":"))) for step in arguments.step]
    most = max(decodes + -(-tokens // LONGEST) for decodes, tokens in steps)
    engine = make_engine(arguments.model, ["--max-num-seqs", most, "--cudagraph-capture", "start", *extra])
    results = []
    for decodes, tokens in steps:
        rows = rows_of(decodes, tokens, arguments.context, engine.facts.block_size, engine.facts.kv_specs)
        for plan in contexts(rows):
            engine.step(plan, 0).wait()
        plan = mixed(rows, decodes)
        run(engine, plan, STEPS // 2)
        found: dict[str, Any] = {"decodes": decodes, "prompt_tokens": tokens, "context": arguments.context}
        found["step_ms"] = round(sorted(run(engine, plan, STEPS) for _ in range(RUNS))[RUNS // 2], 3)
        if arguments.kernels:
            found["kernels"] = kernels(engine, plan)
        results.append(found)
        print(json.dumps(found, indent=1), flush=True)
    if arguments.json:
        report = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "model": Path(arguments.model).name}
        Path(arguments.json).write_text(json.dumps({**report, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
