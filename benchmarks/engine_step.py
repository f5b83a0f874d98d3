"""The GPU engine alone, without the mesh: how long a decode step takes, what the host spends on it, and on which kernels the GPU does.

    python -P benchmarks/engine_step.py MODEL [--batch 1 64] [--context 1024] [--kernels] [--floor] [--prompt-embeds] [--json FILE]
                                       [--compile inductor] [engine flags]

With --prompt-embeds also steps in which one row of the batch computes its prompt, of vectors beside of tokens.

Two steps are in flight, as in the mesh. `step_ms` is the wall time per step, `host_ms` what `engine.step` takes to launch one,
`graph_ms` a replay alone. `of_floor` is the step over the time in which its weights can be read. Dummy weights.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
import harness

from meshlm.architectures.registry import weights_of
from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.kv import KVSpec
from meshlm.protocol.prompt_embeds import PromptEmbeds
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.runtime.model_files.model_config import parse_config
from meshlm.supervisor.settings import flags, resolve
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.engine import make
from meshlm.workers.engine.engine import ModelEngine

MOST = 8192  # tokens of a step that computes contexts
CHUNK = 16  # prompt tokens of a step beside decodes
BYTES, BYTES_A_SECOND = 2, 4.3e12  # of a number in bfloat16; what an H200's memory gives
EMBEDDING = "model.embed_tokens.weight"


def make_engine(model: str, extra: Sequence[str | int], placement: WorkerPlacement | None = None) -> ModelEngine:
    """extra: flags, each with its value."""
    values: dict[str, object] = {"model": model, "device": "cuda", "load_format": "dummy", "dtype": "bfloat16"}
    values["max_model_len"] = 4096
    for name, value in zip(extra[::2], extra[1::2], strict=True):
        values[str(name).removeprefix("--").replace("-", "_")] = int(value) if str(value).isdecimal() else value
    config = resolve.resolve(flags.build(values, None))
    return make.make_engine(config, lambda *progress: None, placement)


def bytes_read(config: dict[str, Any], folder: Path) -> int:
    """Of weights, by a step of one token, in bfloat16. An embedding that is not the head's weight is not read."""
    weights = weights_of(parse_config(config, folder)[0])
    read = [name for name in weights if name != EMBEDDING or "lm_head.weight" not in weights]
    return sum(BYTES * prod(weights[name].shape) for name in read)


def with_floor(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A lone request's step beside the time of reading a dense model's weights."""
    floor_ms = bytes_read(json.loads((folder / "config.json").read_text("utf-8")), folder) / BYTES_A_SECOND * 1e3
    return {**result, "floor_ms": round(floor_ms, 3), "of_floor": round(result["step_ms"] / floor_ms, 3)}


def block_table(row: int, blocks: int, specs: Sequence[KVSpec]) -> NDArray[np.int32]:
    """Pages of a row's blocks, for each group beside one another; states carry one page on. No specs: one group."""
    groups = max(1, len(specs))
    pages = np.arange(row * blocks * groups, (row + 1) * blocks * groups, dtype=np.int32).reshape(blocks, groups)
    for group, spec in enumerate(specs):
        if spec.carried:
            pages[:, group] = pages[0, group]
    return pages.reshape(-1)


def prompts(batch: int, context: int, block_size: int, reserve: int, specs: Sequence[KVSpec] = ()) -> list[NewRow]:
    blocks = -(-(context + reserve) // block_size)
    return [
        NewRow(
            Row(row),
            (np.arange(context, dtype=np.int32) * 7 + row).tobytes(),
            context,
            block_table(row, blocks, specs).tobytes(),
            SamplingParams(max_tokens=reserve, temperature=0.0, seed=row),
        )
        for row in range(batch)
    ]


def decodes(batch: int, start: int) -> StepPlan:
    rows, starts = np.arange(batch, dtype=np.int32), np.full(batch, start, np.int32)
    return StepPlan(1, StepId(2), rows.tobytes(), starts.tobytes(), b"", b"", batch)


def fill(engine: ModelEngine, rows: list[NewRow], context: int) -> None:
    """Computes new rows' contexts, in plans of at most MOST tokens."""
    chunk = max(1, MOST // context)
    for part in (rows[first : first + chunk] for first in range(0, len(rows), chunk)):
        columns = np.array([new.row for new in part], np.int32), np.zeros(len(part)), np.full(len(part), context)
        numbers, starts, counts = (column.astype(np.int32).tobytes() for column in columns)
        engine.step(StepPlan(1, StepId(1), numbers, starts, counts, b"", len(part) * context, new_rows=part), 0).wait()


def mixed(engine: ModelEngine, batch: int, context: int, steps: int, *, vectors: bool) -> float:
    """Seconds of a step with decodes and CHUNK prompt tokens of one more row, which vectors stand in the place of or not."""
    rows = prompts(batch, CHUNK * steps, engine.facts.block_size, context, engine.facts.kv_specs)
    fill(engine, rows[: batch - 1], CHUNK * steps)
    if vectors:
        data = np.zeros(CHUNK * steps * engine.resolved.spec.hidden_size, np.int16).tobytes()
        rows[-1] = replace(rows[-1], extras=(PromptEmbeds("bfloat16", ((0, CHUNK * steps),), data),))
    pending: deque[Any] = deque()
    begun = time.perf_counter()
    for nth in range(steps):
        starts = np.full(batch, CHUNK * steps + nth, np.int32)
        starts[-1], counts = CHUNK * nth, np.ones(batch, np.int32)
        counts[-1] = CHUNK
        plan, samples = decodes(batch, 0), bytes([1] * (batch - 1) + [0])
        plan = replace(
            plan, starts=starts.tobytes(), counts=counts.tobytes(), samples=samples, num_tokens=int(counts.sum())
        )
        pending.append(engine.step(replace(plan, new_rows=rows[-1:] if not nth else []), 0))
        if len(pending) == 2:
            pending.popleft().wait()
    pending.pop().wait()
    return (time.perf_counter() - begun) / steps


def with_vectors(engine: ModelEngine, batch: int, context: int, steps: int) -> dict[str, float]:
    """Steps in which one row computes its prompt, of vectors and of tokens, in turns: medians, and how much of the pace is kept."""
    found = [[mixed(engine, batch, context, steps, vectors=vectors) for vectors in (False, True)] for _ in range(6)][1:]
    tokens_ms, vectors_ms = (1e3 * sorted(times)[2] for times in zip(*found, strict=True))
    return {
        "tokens_ms": round(tokens_ms, 3),
        "vectors_ms": round(vectors_ms, 3),
        "pace": round(tokens_ms / vectors_ms, 3),
    }


def measure(engine: ModelEngine, batch: int, context: int, steps: int, kernels: bool) -> dict[str, Any]:
    reserve = 3 * steps + 64
    rows = prompts(batch, context, engine.facts.block_size, reserve, engine.facts.kv_specs)
    fill(engine, rows, context)
    prefill, n = list[float](), min(batch, max(1, MOST // context))
    for _ in range(4):
        begun = time.perf_counter()
        fill(engine, rows[:n], context)
        prefill.append(time.perf_counter() - begun)
    position = context
    pending: deque[Any] = deque()
    host: list[float] = []

    def run(count: int) -> float:
        nonlocal position
        begun = time.perf_counter()
        for _ in range(count):
            before = time.perf_counter()
            pending.append(engine.step(decodes(batch, position), 0))
            host.append(time.perf_counter() - before)
            position += 1
            if len(pending) == 2:
                pending.popleft().wait()
        while pending:
            pending.popleft().wait()
        return (time.perf_counter() - begun) / count

    run(10)
    host.clear()
    wall = run(steps)
    key = engine.graphs.find(batch, batch, uniform=True)
    result: dict[str, Any] = {"batch": batch, "context": context, "step_ms": round(wall * 1e3, 3)}
    result["host_ms"] = round(sorted(host)[len(host) // 2] * 1e3, 3)
    result["prefill_tokens"], result["prefill_ms"] = n * context, round(min(prefill) * 1e3, 2)
    if key is not None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        engine.graphs.prepare(key)
        begin.record()
        for _ in range(20):
            engine.graphs.replay(key)
        end.record()
        end.synchronize()
        result["graph_ms"] = round(begin.elapsed_time(end) / 20, 3)
    if kernels:
        result["kernels"] = {
            "decode": breakdown(lambda: run(3), 3),
            "prefill": breakdown(lambda: fill(engine, rows[:n], context), 1),
        }
    return result


def breakdown(work: Any, steps: int) -> dict[str, str]:
    """Microseconds a step by kernel, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.device_time_total)
    return {row.key[:70]: f"{row.device_time_total / steps:.1f} us, {row.count / steps:.0f} times" for row in rows[:14]}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--floor", action="store_true", help="of a dense model in bfloat16, for --batch 1")
    parser.add_argument("--prompt-embeds", action="store_true", help="steps with vectors, too")
    parser.add_argument("--compile", choices=["none", "inductor", "eager"], default="none")
    arguments, extra = parser.parse_known_args()
    engine = make_engine(
        arguments.model, [*extra, "--compile", arguments.compile, "--enable-prompt-embeds", arguments.prompt_embeds]
    )
    results = []
    for batch in arguments.batch:
        result = measure(engine, batch, arguments.context, arguments.steps, arguments.kernels)
        if arguments.prompt_embeds:
            result |= with_vectors(engine, batch, arguments.context, 50)
        results.append(with_floor(result, Path(arguments.model)) if arguments.floor and batch == 1 else result)
        print(json.dumps(results[-1], indent=1), flush=True)
    report = {"compile": arguments.compile, "model": Path(arguments.model).name, "results": results}
    harness.keep(arguments.json, report)


if __name__ == "__main__":
    main()
