"""Long prompts in a closed loop on the GPU engine alone: the real StepBudget plans, the real engine computes, no mesh is between them.

    python -P benchmarks/long_loop.py MODEL [--variants "" "LONG_EVEN_TOKENS=1024 BEARABLE_S=0.35" ...] [--prompt 32000] [--streams 4]
                                      [--requests 8] [--kernels CHUNK:START:DECODES ...] [--json FILE] [engine flags]

A variant sets constants of scheduler_proc/budget.py, and arguments of StepBudget (wave=528); in_turn=1 computes attention of decodes
and of prompts one after the other. All of them run in one process. Each step is kept with its decodes, its prompt tokens, those
before them, and the device's milliseconds, so that step_budget.py can be held against it. Two steps are in flight, as in the mesh.
--kernels: a chunk beside up to three decodes, its time and microseconds by kernel, with attention of both beside one another and in
turn. Dummy weights.
"""

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from engine_step import make_engine
from mixed_step import columns, kernels, run
from step_budget import percentiles

from meshlm.protocol.edges.step import NewRow, StepPlan
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Row, StepId
from meshlm.scheduler_proc import budget
from meshlm.scheduler_proc.budget import StepBudget
from meshlm.workers.attention.aux_stream import AuxStream
from meshlm.workers.engine.engine import ModelEngine

STEPS = 20  # of those whose kernels are counted: power and clocks are as in work by then
BOTH = AuxStream.both
WARM_UP = (2, 3), (6000, 12)  # streams and requests; tokens of their prompts and answers, at most


@dataclass(eq=False)
class Stream:
    """A request on its way: what is planned of it, and when its tokens came."""

    row: int
    sent_s: float
    computed: int = 0  # of its prompt
    tokens: int = 0  # of its answer
    came_s: list[float] = field(default_factory=list)


@dataclass
class Step:
    """What a plan computes."""

    decodes: list[Stream]
    chunks: list[tuple[Stream, int, int]]  # stream, start, count
    ends: list[Stream]  # whose prompts end in it

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(count for _, _, count in self.chunks)

    @property
    def num_pairs(self) -> float:
        return sum(count * (start + count / 2) for _, start, count in self.chunks)


class Loop:
    """So many requests, `streams` at a time."""

    def __init__(
        self, engine: ModelEngine, streams: int, requests: int, prompt: int, output: int, **arguments: int
    ) -> None:
        """arguments: of the StepBudget."""
        self.engine, self.streams, self.requests, self.prompt, self.output = engine, streams, requests, prompt, output
        self.budget = StepBudget(engine.resolved.max_num_batched_tokens, **arguments)  # type: ignore[arg-type]
        self._rows = list(range(streams))
        self.prompts: list[Stream] = []
        self.decodes: list[Stream] = []
        self.streams_done: list[Stream] = []
        self.steps: list[dict[str, Any]] = []
        self._sent = self._last_done_ns = 0

    def run(self) -> dict[str, Any]:
        begun = time.perf_counter()
        for _ in range(min(self.streams, self.requests)):
            self._send(begun)
        pending: deque[tuple[Any, Step]] = deque()
        while self.prompts or self.decodes or pending:
            if self.prompts or self.decodes:
                step = self._next()
                pending.append((self.engine.step(self._plan(step), 0), step))
            if len(pending) == 2 or not (self.prompts or self.decodes):
                self._settle(*pending.popleft())
        end = max(stream.came_s[-1] for stream in self.streams_done)
        between = [b - a for one in self.streams_done for a, b in zip(one.came_s, one.came_s[1:], strict=False)]
        return {
            "output_tok_s": round(self.requests * self.output / (end - begun), 2),
            "ttft_ms": _ms([one.came_s[0] - one.sent_s for one in self.streams_done]),
            "itl_ms": _ms(between),
            "num_steps": len(self.steps),
            "device_s": round(sum(step["ms"] for step in self.steps) / 1e3, 3),
            "wall_s": round(end - begun, 3),
        }

    def _send(self, now: float) -> None:
        self.prompts.append(Stream(self._rows.pop(), now))
        self._sent += 1

    def _next(self) -> Step:
        """As scheduler_proc/batching.py: all decodes, then prompts in their order."""
        decodes, context = list(self.decodes), self.prompts[0].computed if self.prompts else 0
        outstanding = sum(self.prompt - stream.computed for stream in self.prompts)
        left = self.budget.prefill_limit(len(decodes), outstanding, context)
        step = Step(decodes, [], [])
        while left and self.prompts:
            stream = self.prompts[0]
            count = min(left, self.prompt - stream.computed)
            step.chunks.append((stream, stream.computed, count))
            stream.computed, left = stream.computed + count, left - count
            if stream.computed == self.prompt:
                step.ends.append(self.prompts.pop(0))
        return step

    def _plan(self, step: Step) -> StepPlan:
        """The message, and the streams as they are once it is computed."""
        decodes = [(stream.row, self.prompt + stream.tokens - 1, 1) for stream in step.decodes]
        chunks = [(stream.row, start, count) for stream, start, count in step.chunks]
        rows, starts, counts = (_i32([each[column] for each in (*decodes, *chunks)]) for column in range(3))
        samples = bytes([1] * len(decodes) + [stream in step.ends for stream, _, _ in step.chunks])
        new = [self.new_row(stream) for stream, start, _ in step.chunks if not start]
        plan = StepPlan(1, StepId(1), rows, starts, counts, samples, step.num_tokens, new_rows=new)
        for stream in (*step.decodes, *step.ends):
            stream.tokens += 1
        self.decodes = [stream for stream in (*self.decodes, *step.ends) if stream.tokens < self.output]
        return plan

    def new_row(self, stream: Stream) -> NewRow:
        blocks = -(-(self.prompt + self.output) // self.engine.facts.block_size)
        tokens = (np.arange(self.prompt) * 7 + self._sent) % self.engine.facts.vocab_size
        table = list(range(stream.row * blocks, (stream.row + 1) * blocks))
        sampling = SamplingParams(max_tokens=self.output, temperature=0.0, seed=1)
        return NewRow(Row(stream.row), tokens.astype(np.int32).tobytes(), self.prompt, _i32(table), sampling)

    def _settle(self, pending: Any, step: Step) -> None:
        """A step's tokens are there."""
        result = pending.wait()
        now, begun_ns = time.perf_counter(), max(result.launched_ns, self._last_done_ns)
        duration_s, self._last_done_ns = (result.gpu_ns or result.done_ns - begun_ns) / 1e9, result.done_ns
        self.budget.learn(step.num_tokens, len(step.decodes), duration_s, step.num_pairs)
        start = step.chunks[0][1] if step.chunks else 0
        prompts = step.num_tokens - len(step.decodes)
        self.steps.append({"decodes": len(step.decodes), "prompts": prompts, "start": start})
        self.steps[-1]["ms"] = round(duration_s * 1e3, 3)
        for stream in (*step.decodes, *step.ends):
            stream.came_s.append(now)
            if len(stream.came_s) == self.output:
                self.budget.ended(self.prompt, self.output)
                self.streams_done.append(stream)
                self._rows.append(stream.row)
                if self._sent < self.requests:
                    self._send(now)


def _i32(values: list[int]) -> bytes:
    return np.array(values, np.int32).tobytes()


def _graphs(engine: ModelEngine) -> dict[str, int]:
    """Steps so far that were replayed from CUDA graphs, and why others were not."""
    counts = engine.graph_counts()
    return {**counts.replays, **counts.misses}


def _ms(seconds: list[float]) -> dict[str, float]:
    return {name: round(1e3 * value, 1) for name, value in percentiles(seconds).items()}


def by_kernel(engine: ModelEngine, prompt: int, chunk: int, start: int, decodes: int) -> dict[str, Any]:
    """A chunk beside decodes behind whole prompts, over whatever the cache holds."""
    rows = [Loop(engine, 4, 4, prompt + 64, 1).new_row(Stream(row, 0.0)) for row in range(4)]
    engine.step(columns(rows, [0] * 4, [16] * 4, rows), 0).wait()
    plan = columns(rows[3 - decodes :], [prompt] * decodes + [start], [1] * decodes + [chunk], [])
    plan = msgspec.structs.replace(plan, samples=bytes([1] * decodes + [0]))
    step_ms = round(run(engine, plan, STEPS), 3)
    found = kernels(engine, plan)
    return {"chunk": chunk, "start": start, "decodes": decodes, "step_ms": step_ms, "kernels": found}


def in_turn(_: AuxStream, first: Callable[[], object], second: Callable[[], object]) -> None:
    """AuxStream.both without a second stream."""
    first()
    second()


def set_constants(variant: str, defaults: dict[str, Any]) -> dict[str, int]:
    """Those of a variant, all others as they stand in the source; returns the arguments of StepBudget that it has."""
    changed = dict(each.split("=") for each in variant.split())
    given = {name: int(changed.pop(name)) for name in list(changed) if name.islower()}
    setattr(AuxStream, "both", in_turn if given.pop("in_turn", 0) else BOTH)  # noqa: B010 - a method, for this process
    for name, value in defaults.items():
        setattr(budget, name, type(value)(float(changed.pop(name, value))))
    if changed:
        raise SystemExit(f"scheduler_proc/budget.py has no constant {', '.join(changed)}")
    return given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--variants", nargs="+", default=[""])
    parser.add_argument("--prompt", type=int, default=32000)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--kernels", nargs="*", default=[], metavar="CHUNK:START:DECODES")
    parser.add_argument("--json")
    arguments, extra = parser.parse_known_args()
    defaults = {name: value for name, value in vars(budget).items() if name.isupper()}
    for variant in arguments.variants:
        set_constants(variant, defaults)
    longest = arguments.prompt + arguments.output + 128
    begun = time.perf_counter()
    flags = ["--max-model-len", longest, "--max-num-batched-tokens", 8192]
    engine = make_engine(arguments.model, [*flags, *extra])
    shape = arguments.prompt, arguments.output
    report: dict[str, Any] = {"model": Path(arguments.model).name, "torch": torch.__version__, **vars(arguments)}
    report |= {"gpu": torch.cuda.get_device_name() if engine.device.type == "cuda" else "none"}
    report |= {"ready_s": round(time.perf_counter() - begun, 1), "results": [], "kernels": []}
    Loop(engine, *WARM_UP[0], *map(min, WARM_UP[1], shape)).run()
    for variant in arguments.variants:
        given = set_constants(variant, defaults)
        loop = Loop(engine, arguments.streams, arguments.requests, *shape, **given)
        report["results"].append({"variant": variant, **loop.run(), "graphs": _graphs(engine)})
        print(json.dumps(report["results"][-1]), flush=True)
        report["results"][-1]["steps"] = loop.steps
    for each in arguments.kernels:
        sizes = [int(size) for size in each.split(":")]
        for turns in (0, 1) if sizes[2] else (0,):
            set_constants(f"in_turn={turns}", defaults)
            report["kernels"].append({"in_turn": turns, **by_kernel(engine, arguments.prompt, *sizes)})
            print(each, turns, report["kernels"][-1]["step_ms"], flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
