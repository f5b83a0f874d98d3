"""The measurements, summed up under vLLM's names, and the files of results."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshlm.supervisor.errors import StartError, UsageError, raised_as


def claim(flag: str, file: Path | None) -> None:
    """The file can be written, and its folder is there, where one is wanted. UsageError."""
    if file is None:
        return
    with raised_as(UsageError, OSError, ValueError, of=f"{flag}: {file}"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()


def write(file: Path | None, result: dict[str, Any], *, append: bool = False) -> None:
    """Writes the result as JSON, where a file is wanted; append: on a line of its own behind the others. StartError when it cannot."""
    if file is None:
        return
    text = json.dumps(result, indent=None if append else 1)
    with raised_as(StartError, OSError, of=str(file)):
        if append and file.stat().st_size:
            with file.open("a", encoding="utf-8") as out:
                out.write("\n" + text)
        else:
            file.write_text(text, "utf-8")


METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
DRAFTS = {
    "Acceptance rate (%):": "acceptance_rate",
    "Acceptance length:": "acceptance_length",
    "Drafts:": "num_drafts",
    "Draft tokens:": "draft_tokens",
    "Accepted tokens:": "accepted_tokens",
}
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
SHOWN_ERRORS = 10


@dataclass
class Measured:
    """One request, in seconds."""

    start: float = 0.0
    ok: bool = False
    error: str = ""
    prompt_len: int = 0
    output_len: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def tpot(self) -> float:
        """0 for an answer of one token."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


def percentiles(values: list[float], wanted: list[float]) -> dict[float, float]:
    """Percentiles by linear interpolation, as numpy's default is."""
    ordered = sorted(values)
    found = {}
    for percent in wanted:
        position = (len(ordered) - 1) * percent / 100
        below = int(position)
        above = min(below + 1, len(ordered) - 1)
        found[percent] = ordered[below] + (ordered[above] - ordered[below]) * (position - below) if ordered else 0.0
    return found


def summed_up(results: Sequence[Measured], duration: float, goodput: Mapping[str, float]) -> dict[str, Any]:
    """The figures that are no percentiles. goodput: milliseconds by metric that a good request keeps to."""
    good = [result for result in results if result.ok]
    inputs, outputs = sum(r.prompt_len for r in good), sum(r.output_len for r in good)
    kept = sum(all(_of(r, name) * 1e3 <= limit for name, limit in goodput.items()) for r in good)
    peak, most = _peaks(good)
    return {
        "duration": duration,
        "completed": len(good),
        "failed": len(results) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / duration,
        "request_goodput": kept / duration if goodput else None,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
        "input_lens": [r.prompt_len for r in results],
        "output_lens": [r.output_len if r.ok else 0 for r in results],
        "ttfts": [r.ttft for r in results],
        "itls": [r.itl for r in results],
        "start_times": [r.start for r in results],
        "generated_texts": [r.text for r in results],
        "errors": [r.error for r in results],
        "max_output_tokens_per_s": peak,
        "max_concurrent_requests": most,
    }


def _of(result: Measured, name: str) -> float:
    return {"ttft": result.ttft, "tpot": result.tpot, "e2el": result.latency}[name]


def _peaks(good: Sequence[Measured]) -> tuple[float, int]:
    """The most chunks, and the most requests that were open, in one second since the first request."""
    if not good:
        return 0.0, 0
    zero = min(r.start for r in good)
    seconds = int(max(r.start + r.latency for r in good) - zero) + 1
    tokens, open_requests = [0] * seconds, [0] * seconds
    for r in good:
        at = r.start - zero + r.ttft
        for interval in (0.0, *r.itl):
            at += interval
            tokens[min(int(at), seconds - 1)] += 1
        for second in range(int(r.start - zero), min(int(r.start - zero + r.latency), seconds - 1) + 1):
            open_requests[second] += 1
    return float(max(tokens)), max(open_requests)


def spread(results: Sequence[Measured], name: str, wanted: list[float]) -> dict[str, float]:
    """Mean, median, deviation and percentiles of one metric, in milliseconds, by their names in the result."""
    good = [result for result in results if result.ok]
    values = {
        "ttft": [r.ttft for r in good],
        "tpot": [r.tpot for r in good if r.output_len > 1],
        "itl": [value for r in good for value in r.itl],
        "e2el": [r.latency for r in good],
    }[name]
    data = [value * 1e3 for value in values]
    mean = sum(data) / max(1, len(data))
    deviation = math.sqrt(sum((value - mean) ** 2 for value in data) / max(1, len(data)))
    found = percentiles(data, [50.0, *wanted])
    named = {f"p{percent:g}_{name}_ms": found[percent] for percent in wanted}
    return {f"mean_{name}_ms": mean, f"median_{name}_ms": found[50.0], f"std_{name}_ms": deviation, **named}


def show(result: Mapping[str, Any], metrics: Sequence[str], wanted: Sequence[float]) -> None:
    """Prints the figures on standard output, in vLLM's form."""
    print(f"{' Serving Benchmark Result ':=^50}")
    for label, key in (
        ("Successful requests:", "completed"),
        ("Failed requests:", "failed"),
        ("Maximum request concurrency:", "max_concurrency"),
        ("Request rate configured (RPS):", "request_rate"),
        ("Benchmark duration (s):", "duration"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Request goodput (req/s):", "request_goodput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Peak output token throughput (tok/s):", "max_output_tokens_per_s"),
        ("Peak concurrent requests:", "max_concurrent_requests"),
        ("Total token throughput (tok/s):", "total_token_throughput"),
    ):
        if result[key] not in (None, "inf"):
            _line(label, result[key])
    for name, (short, long) in METRICS.items():
        if name in metrics:
            print(f"{long:-^50}")
            _line(f"Mean {short} (ms):", result[f"mean_{name}_ms"])
            _line(f"Median {short} (ms):", result[f"median_{name}_ms"])
            for percent in wanted:
                _line(f"P{percent:g} {short} (ms):", result[f"p{percent:g}_{name}_ms"])
    if "spec_decode_num_drafts" in result:
        print(f"{'Speculative Decoding':-^50}")
        for label, key in DRAFTS.items():
            _line(label, result[f"spec_decode_{key}"])
        print("Per-position acceptance (%):")
        for position, rate in enumerate(result["spec_decode_per_position_acceptance_rates"]):
            _line(f"  Position {position}:", 100 * rate)
    print("=" * 50)
    errors = list(dict.fromkeys(" ".join(error.split()) for error in result["errors"] if error))
    for error in errors[:SHOWN_ERRORS]:
        print(f"failed: {error}")


def _line(label: str, value: float) -> None:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    print(f"{label:<40} {shown:<10}")
