"""One decode step across all processes, from the timestamps in the messages; the headline is the gap between two GPU steps.

    python -P benchmarks/step_timeline.py MODEL [--streams 1] [--tokens 256] [--svg FILE] [--json FILE] [meshlm serve flags]

Runs the mesh through the Python API with `streams` requests of 512 random prompt tokens. All clocks are this host's monotonic one.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from meshlm import LLM, SamplingParams
from meshlm.protocol.edges.text import TextDeltas

STAGES = ("plan and send", "wait for the GPU", "GPU", "return to scheduler", "decode and deliver")
COLOURS = ("#4878a8", "#c8c8c8", "#58a066", "#d08a3c", "#a0589c")


def record(model: str, streams: int, tokens: int, settings: dict[str, Any]) -> list[tuple[int, ...]]:
    """(step, planned, received, launched, done, handled, gpu, gap, delivered) in ns, for every step that was seen."""
    llm = LLM(model, **settings)
    seen: list[tuple[int, ...]] = []
    client = llm._client
    deliver = client.on_message

    def on_message(peer: Any, message: Any) -> None:
        now = time.monotonic_ns()
        if isinstance(message, TextDeltas) and message.timings_ns:
            seen.append((*message.timings_ns, now))
        deliver(peer, message)

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    prompts = [[(31 * s + 7 * i) % 10000 + 100 for i in range(512)] for s in range(streams)]
    llm.generate(prompts, params, use_tqdm=False)  # captures graphs, warms caches
    client.on_message = on_message  # type: ignore[method-assign]
    llm.generate(prompts, params, use_tqdm=False)
    client.on_message = deliver  # type: ignore[method-assign]
    llm.shutdown()
    return seen


def summary(seen: list[tuple[int, ...]]) -> dict[str, Any]:
    """Medians over the middle of the run, in microseconds."""
    steps = seen[len(seen) // 4 : -len(seen) // 8 or None]
    durations: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for _, planned, received, _launched, done, handled, gpu, _gap, delivered in steps:
        durations["plan and send"].append((received - planned) / 1e3)
        durations["wait for the GPU"].append((done - gpu - received) / 1e3)
        durations["GPU"].append(gpu / 1e3)
        durations["return to scheduler"].append((handled - done) / 1e3)
        durations["decode and deliver"].append((delivered - handled) / 1e3)
    between = [(b[4] - a[4]) / 1e3 for a, b in itertools.pairwise(steps) if b[0] == a[0] + 1]
    gaps = [step[7] / 1e3 for step in steps]
    launch = [(step[3] - step[2]) / 1e3 for step in steps]
    gpu_total = sum(step[6] for step in steps) / 1e3
    return {
        "steps": len(steps),
        "step_us": round(statistics.median(between), 1) if between else None,
        "gpu_gap_us": {"p50": round(statistics.median(gaps), 1), "mean": round(statistics.fmean(gaps), 1)},
        "gpu_idle_share": round(sum(gaps) / max(1e-9, sum(gaps) + gpu_total), 4),
        "host_launch_us": round(statistics.median(launch), 1),
        "stages_us": {stage: round(statistics.median(values), 1) for stage, values in durations.items()},
    }


def draw(seen: list[tuple[int, ...]], title: str) -> str:
    """Eight consecutive steps as an SVG, one line each."""
    middle = len(seen) // 2
    steps = seen[middle : middle + 8]
    begin, end = steps[0][1], steps[-1][8]
    scale, left, row = 900 / (end - begin), 70, 26
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12" '
        f'width="1000" height="{row * len(steps) + 90}">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="14">{title}</text>',
    ]
    for place, (stage, colour) in enumerate(zip(STAGES, COLOURS, strict=True)):
        out.append(f'<rect x="{10 + place * 190}" y="30" width="12" height="12" fill="{colour}"/>')
        out.append(f'<text x="{26 + place * 190}" y="41">{stage}</text>')
    for line, (step, planned, received, _launched, done, handled, gpu, _gap, delivered) in enumerate(steps):
        y = 56 + line * row
        out.append(f'<text x="10" y="{y + 14}">step {step}</text>')
        borders = (planned, received, max(received, done - gpu), done, handled, delivered)
        for (first, last), colour in zip(itertools.pairwise(borders), COLOURS, strict=True):
            x, width = left + (first - begin) * scale, max(0.5, (last - first) * scale)
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{colour}"/>')
    axis = 56 + len(steps) * row + 14
    out.append(
        f'<text x="{left}" y="{axis}">0</text><text x="900" y="{axis}">{(end - begin) / 1e6:.2f} ms</text></svg>'
    )
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--svg")
    parser.add_argument("--json")
    arguments, extra = parser.parse_known_args()
    settings: dict[str, Any] = {"disable_log_requests": True}
    for name, value in zip(extra[::2], extra[1::2], strict=True):
        settings[name.removeprefix("--").replace("-", "_")] = int(value) if value.isdecimal() else value
    results = []
    for streams in arguments.streams:
        seen = record(arguments.model, streams, arguments.tokens, settings)
        results.append({"streams": streams, **summary(seen)})
        print(json.dumps(results[-1], indent=1), flush=True)
        if arguments.svg:
            name = arguments.svg.replace(".svg", f"-{streams}.svg")
            gap = results[-1]["gpu_gap_us"]["p50"]
            Path(name).write_text(
                draw(seen, f"{Path(arguments.model).name}, {streams} streams: gap between GPU steps {gap} us")
            )
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"model": Path(arguments.model).name, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
