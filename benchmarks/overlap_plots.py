"""Draws docs/images/dbo-*.svg from benchmarks/results/expert_parallel*_h200.json and dbo_timeline_h200.json, in plain SVG.

    python -P benchmarks/overlap_plots.py

The timeline has the kernels of two layers on a GPU, by benchmarks/expert_parallel.py --trace: computing above, travelling below.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"
COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#8d6a9f")
TRAVELS = ("nccl", "_send", "_give_back", "_signal", "PtoP", "memcpy128")
EXPERTS = ("_count", "_sum_up", "_place", "_grouped_gemm", "_weighted_sum")
SHADES = {
    ("attention", 1): "#1b6ca8", ("attention", 0): "#8fbbdc", ("experts", 1): "#3d8b5f", ("experts", 0): "#a5d3b8",
    ("network", 1): "#d1893b", ("wait", 1): "#bbbbbb",
}  # fmt: skip
NAMES = ("attention", "of the other half", "experts", "of the other half", "network", "wait")
LEFT, WIDE, ROW = 90, 860, 26


class Event(NamedTuple):
    """A kernel, in µs."""

    name: str
    begin: float
    us: float

    @property
    def kind(self) -> str:
        if any(word in self.name for word in TRAVELS):
            return "network"
        if self.name.startswith("_wait"):
            return "wait"
        return "experts" if self.name.startswith(EXPERTS) or "elementwise" in self.name else "attention"


def halves_of(events: list[Event]) -> list[int]:
    """1 for the half that leads, 0 for the other: experts 1, experts 0, attention 1, attention 0, and so on."""
    computes = [event for event in events if event.kind in ("attention", "experts")]
    turns, turn = [], 0
    for event in computes:
        turns.append(turn)
        turn += event.name.startswith(("_weighted_sum", "_select_experts"))
    follows = next(
        (
            turns[at]
            for at in range(len(computes) - 1)
            if computes[at].name.startswith("_weighted_sum") and computes[at + 1].kind == "attention"
        ),
        0,
    )  # the experts of the half that follows come before the attention of the one that leads
    of = {id(event): (turn - follows) % 2 for event, turn in zip(computes, turns, strict=True)}
    return [of.get(id(event), 1) for event in events]


def panel(title: str, raw: list[list[Any]], end_us: float, top: int, *, halved: bool) -> str:
    events = [Event(name, begin, us) for _, name, begin, us in raw if begin < end_us]
    shades = halves_of(events) if halved else [1] * len(events)
    out = [f'<text x="10" y="{top}" font-size="13">{title}</text>']
    for row, name in enumerate(("compute", "network")):
        out.append(f'<text x="10" y="{top + 24 + row * ROW}">{name}</text>')
    for event, half in zip(events, shades, strict=True):
        x, width = LEFT + event.begin / end_us * WIDE, max(0.6, min(event.us, end_us - event.begin) / end_us * WIDE)
        y = top + 10 + (ROW if event.kind == "network" else 0)
        colour = SHADES[event.kind, half if event.kind in ("attention", "experts") else 1]
        out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="20" fill="{colour}"/>')
    axis = top + 2 * ROW + 24
    out += [
        f'<text x="{LEFT + WIDE * part / 4:.0f}" y="{axis}" text-anchor="middle" fill="#666">{end_us * part / 4:,.0f} µs</text>'
        for part in range(5)
    ]
    return "\n".join(out)


def timeline(traces: dict[str, Any], end_us: float = 2400.0) -> str:
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11" width="980" height="270">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, ((kind, half), name) in enumerate(zip(SHADES, NAMES, strict=True)):
        x = 90 + place * 145
        out.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{SHADES[kind, half]}"/>')
        out.append(f'<text x="{x + 16}" y="18">{name}</text>')
    out.append(panel("4,096 tokens a rank as a whole", traces["whole"], end_us, 48, halved=False))
    out.append(panel("the same in two halves", traces["halves"], end_us, 158, halved=True))
    return "\n".join([*out, "</svg>"])


def chart(title: str, lines: dict[str, list[tuple[int, float]]], left: int, begin: int) -> str:
    """How much faster, by tokens on a logarithmic axis."""
    low, high, wide, tall, top = 0.5, 1.2, 360, 190, begin + 40
    xs = sorted({tokens for points in lines.values() for tokens, _ in points})

    def place(tokens: float, ratio: float) -> tuple[float, float]:
        right = math.log2(tokens / xs[0]) / math.log2(xs[-1] / xs[0])
        return left + 50 + wide * right, top + tall * (high - ratio) / (high - low)

    out = [f'<text x="{left + 50}" y="{begin + 20}" font-size="13">{title}</text>']
    for tick in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2):
        y = place(xs[0], tick)[1]
        colour = "#777" if tick == 1.0 else "#ddd"
        out.append(f'<line x1="{left + 50}" x2="{left + 50 + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"/>')
        out.append(f'<text x="{left + 44}" y="{y + 4:.1f}" text-anchor="end">{tick:.1f}</text>')
    for tokens in xs:
        out.append(
            f'<text x="{place(tokens, low)[0]:.1f}" y="{top + tall + 16}" text-anchor="middle">{tokens:,}</text>'
        )
    for nth, (name, points) in enumerate(lines.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        out.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[nth]}" stroke-width="2"/>')
        out += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[nth]}"/>' for x, y in (place(*p) for p in points)
        ]
        y = top + tall + 36 + 15 * nth
        out.append(f'<rect x="{left + 50}" y="{y - 9}" width="10" height="10" fill="{COLOURS[nth]}"/>')
        out.append(f'<text x="{left + 66}" y="{y}">{name}</text>')
    return "\n".join(out)


def speedups(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row of charts for each run, by its name."""
    tall = 310
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="11" width="880" height="{tall * len(runs)}">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for row, (name, steps) in enumerate(runs.items()):
        for place, kind in enumerate(("prefill", "decode")):
            lines: dict[str, list[tuple[int, float]]] = {}
            for step in steps:
                if step["kind"] == kind:
                    lines.setdefault(step["backend"], []).append((step["tokens"], step["speedup"]))
            title = f"{name}, {kind}: whole step / in halves, by tokens a rank"
            out.append(chart(title, lines, 430 * place, tall * row))
    return "\n".join([*out, "</svg>"])


def main() -> None:
    files = {"two GPUs": "expert_parallel_h200.json", "four GPUs": "expert_parallel_4_h200.json"}
    runs = {name: json.loads((HERE / "results" / file).read_text())["steps"] for name, file in files.items()}
    traces = json.loads((HERE / "results" / "dbo_timeline_h200.json").read_text())
    (IMAGES / "dbo-speedup.svg").write_text(speedups(runs) + "\n")
    (IMAGES / "dbo-timeline.svg").write_text(timeline(traces) + "\n")


if __name__ == "__main__":
    main()
