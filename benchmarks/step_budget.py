"""Closed-loop serving in simulated time, to choose the constants of scheduler_proc/budget.py: the real StepBudget, and steps that take
what the GPU was measured to take.

    python -P benchmarks/step_budget.py [--streams 64 256] [--prompt 1024] [--output 128] [--set EVEN_TOKENS=640 ...] [--json FILE]

A step's time: products by rows (product_h200.json), keys and values that decodes read, and what prompts cost besides. Two steps are in
flight, so who arrives while a step runs is planned after it.
"""

import argparse
import json
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from meshlm.scheduler_proc import budget
from meshlm.scheduler_proc.budget import StepBudget, on_grid

RESULTS = Path(__file__).parent / "results"
CLIENT_S = 0.0015  # from the last token of an answer to the next request


class Gpu(NamedTuple):
    """What a step of one model takes on an H200, in milliseconds (targets_*, side_by_side_h200.json, kernel times)."""

    layers: int
    products: tuple[tuple[int, int], ...]  # outputs, inputs
    context_ms: float  # a token of context that a decode reads
    step_ms: float  # everything else in a step of decodes,
    mixed_ms: float  # in one with prompts,
    prompt_ms: float  # for each token of a prompt,
    pair_ms: float  # and for each earlier token that it attends to, where attention's tiles fill the GPU
    wave: int  # tokens whose tiles fill it once: 132 multiprocessors x 128 rows / query heads


MODELS = {
    "qwen3-0.6b": Gpu(
        28, ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), 25.1e-6, 0.47, 0.70, 0.60e-3, 0.40e-6, 1056
    ),
    "llama3-8b": Gpu(
        32, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), 33.8e-6, 0.95, 1.35, 1.5e-3, 0.95e-6, 528
    ),
}


@dataclass
class Stream:
    """A request on its way."""

    sent_s: float
    computed: int = 0  # of its prompt
    tokens: int = 0  # of its answer
    last_s: float = 0.0


@dataclass
class Run:
    """One workload: so many requests, `streams` at a time."""

    gpu: Gpu
    budget: StepBudget
    streams: int
    requests: int
    prompt: int
    output: int
    arrivals: deque[Stream] = field(default_factory=deque)
    prompts: deque[Stream] = field(default_factory=deque)
    decodes: list[Stream] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    steps: int = 0

    def run(self) -> dict[str, Any]:
        products = product_ms(self.gpu)
        self.arrivals.extend(Stream(0.0) for _ in range(self.streams))
        sent = self.streams
        before_s = end_s = 0.0  # ends of the last two steps
        while self.arrivals or self.prompts or self.decodes:
            while self.arrivals and self.arrivals[0].sent_s <= before_s:
                self.prompts.append(self.arrivals.popleft())
            if not self.prompts and not self.decodes:
                before_s, end_s = end_s, max(end_s, self.arrivals[0].sent_s)
                continue
            begun_s = max(before_s, end_s)
            num_tokens, num_decodes, finished, step_s, pairs = self.step(products)
            before_s, end_s = end_s, begun_s + step_s
            self.budget.learn(num_tokens, num_decodes, step_s, pairs)
            for _ in range(min(self.take(finished, end_s), self.requests - sent)):
                self.arrivals.append(Stream(end_s + CLIENT_S))
                sent += 1
        return {
            "output_tok_s": round(self.requests * self.output / end_s),
            "ttft_ms": {name: round(1e3 * value, 1) for name, value in percentiles(self.first_s).items()},
            "itl_ms": {name: round(1e3 * value, 1) for name, value in percentiles(self.between_s).items()},
            "steps": self.steps,
        }

    def step(self, products: Callable[[int], float]) -> tuple[int, int, list[Stream], float, float]:
        """Its tokens, its decodes, the prompts it ends, its seconds, and how many earlier tokens its prompts' attend to."""
        num_decodes = len(self.decodes)
        outstanding = sum(self.prompt - stream.computed for stream in self.prompts)
        context = self.prompts[0].computed if self.prompts else 0
        left = self.budget.prefill_limit(num_decodes, outstanding, context)
        num_tokens, finished, pairs, filled = num_decodes, [], 0.0, 0.0
        while left and self.prompts:
            stream = self.prompts[0]
            count = min(left, self.prompt - stream.computed)
            pairs += count * (stream.computed + count / 2)
            filled += -(-count // self.gpu.wave) * self.gpu.wave * (stream.computed + count / 2)
            stream.computed += count
            num_tokens, left = num_tokens + count, left - count
            if stream.computed == self.prompt:
                finished.append(self.prompts.popleft())
        self.steps += 1
        seen = sum(self.prompt + stream.tokens for stream in self.decodes)
        num_prompts = num_tokens - num_decodes
        other = (
            self.gpu.mixed_ms
            + self.gpu.prompt_ms * num_prompts
            + self.gpu.pair_ms * max(pairs, filled if context else 0)
            if num_prompts
            else self.gpu.step_ms
        )
        rows = next(
            size for size in range(num_tokens, 2 * num_tokens + 128) if not num_prompts or on_grid(size) == size
        )
        return num_tokens, num_decodes, finished, (products(rows) + self.gpu.context_ms * seen + other) / 1e3, pairs

    def take(self, finished: list[Stream], now_s: float) -> int:
        """A step's tokens arrive; returns how many requests ended."""
        for stream in self.decodes:
            self.between_s.append(now_s - stream.last_s)
        for stream in finished:
            self.first_s.append(now_s - stream.sent_s)
        going = [*self.decodes, *finished]
        for stream in going:
            stream.tokens, stream.last_s = stream.tokens + 1, now_s
        self.decodes = [stream for stream in going if stream.tokens < self.output]
        for _ in range(len(going) - len(self.decodes)):
            self.budget.ended(self.prompt, self.output)
        return len(going) - len(self.decodes)


def product_ms(gpu: Gpu) -> Callable[[int], float]:
    """All products of so many rows, between the measured numbers of rows on straight lines."""
    measured: dict[int, float] = {}
    for each in json.loads((RESULTS / "product_h200.json").read_text())["results"]:
        if (each["outputs"], each["inputs"]) in gpu.products:
            measured[each["rows"]] = measured.get(each["rows"], 0.0) + each["us"] * gpu.layers / 1e3
    rows = sorted(measured)

    def of(count: int) -> float:
        at = bisect_left(rows, count)
        if not 0 < at < len(rows):
            return measured[rows[min(at, len(rows) - 1)]]
        low, high = rows[at - 1], rows[at]
        return measured[low] + (measured[high] - measured[low]) * (count - low) / (high - low)

    return of


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{each}": ordered[min(len(ordered) - 1, len(ordered) * each // 100)] for each in (50, 99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="constants of scheduler_proc/budget.py"
    )
    parser.add_argument("--max-itl-ms", type=float)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    for name, value in (each.split("=") for each in arguments.set):
        setattr(budget, name, type(getattr(budget, name))(float(value)))
    report = []
    for model, gpu in MODELS.items():
        for streams in arguments.streams:
            run = Run(
                gpu,
                StepBudget(8192, max_itl_s=arguments.max_itl_ms and arguments.max_itl_ms / 1e3),
                streams,
                (5 if streams < 128 else 4) * streams,
                arguments.prompt,
                arguments.output,
            )
            report.append({"model": model, "streams": streams, **run.run()})
            print(json.dumps(report[-1]), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"set": arguments.set, "results": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
