"""Draws docs/images/scaling-*.svg from benchmarks/results/scaling_*.json, in plain SVG.

python -P benchmarks/scaling_plots.py
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
COLOURS = ("#1b6ca8", "#d1495b", "#66a182", "#8d6a9f", "#c98a1b")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 460, 300, 62, 34, 14, 78
Row = dict[str, Any]


class Line(NamedTuple):
    name: str
    points: list[tuple[float, float]]


def rows() -> list[Row]:
    found: list[Row] = []
    for file in sorted((HERE / "results").glob("scaling_*.json")):
        found += json.loads(file.read_text())["results"]
    return sorted(found, key=lambda row: int(row["ranks"]))


def lines(found: list[Row], traffic: str, value: Any) -> list[Line]:
    """One line for each policy."""
    names = ("cache-aware", "least-loaded", "round-robin")
    return [
        Line(name, [(r["ranks"], value(r)) for r in found if r["routing"] == name and r["traffic"] == traffic])
        for name in names
    ]


def chart(title: str, unit: str, data: list[Line], *, log: bool, at: tuple[int, int] = (0, 0)) -> str:
    """Ranks on a logarithmic axis."""
    data = [line for line in data if line.points]
    xs = [x for line in data for x, _ in line.points]
    ys = [y for line in data for _, y in line.points if y > 0]
    low, high = (
        (10 ** math.floor(math.log10(min(ys))), 10 ** math.ceil(math.log10(max(ys)))) if log else (0, max(ys) * 1.05)
    )
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        right = math.log2(x) / max(1.0, math.log2(max(xs)))
        up = (math.log10(max(y, low) / low) / math.log10(high / low)) if log else y / high
        return LEFT + wide * right, TOP + tall * (1 - up)

    parts = [f'<g transform="translate({at[0]},{at[1]})" font-family="sans-serif" font-size="11">']
    parts.append(f'<text x="{LEFT}" y="18" font-size="13">{title}</text>')
    ticks = [low * 10**n for n in range(round(math.log10(high / low)) + 1)] if log else [high * n / 4 for n in range(5)]
    for tick in ticks:
        y = place(1, tick)[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,.3g}</text>'
            if tick < 1e4
            else f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:,.0f}</text>'
        )
    for x in sorted(set(xs)):
        parts.append(f'<text x="{place(x, high)[0]:.1f}" y="{TOP + tall + 15}" text-anchor="middle">{x:.0f}</text>')
    parts.append(f'<text x="{LEFT + wide / 2}" y="{TOP + tall + 30}" text-anchor="middle">ranks; {unit}</text>')
    for number, line in enumerate(data):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in (place(*p) for p in line.points)
        ]
        x, y = LEFT + (number % 2) * wide / 2, TOP + tall + 44 + 14 * (number // 2)
        parts.append(
            f'<rect x="{x}" y="{y - 8}" width="10" height="10" fill="{colour}"/><text x="{x + 15}" y="{y + 1}">{line.name}</text>'
        )
    return "\n".join([*parts, "</g>"])


def write(name: str, *charts: tuple[str, str, list[Line], bool]) -> None:
    """Charts side by side, two in a row."""
    across, down = min(2, len(charts)), -(-len(charts) // 2)
    body = [
        chart(title, unit, data, log=log, at=(WIDTH * (n % 2), HEIGHT * (n // 2)))
        for n, (title, unit, data, log) in enumerate(charts)
    ]
    size = f'width="{WIDTH * across}" height="{HEIGHT * down}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect width="100%" height="100%" fill="white"/>'
    (HERE.parent / "docs" / "images" / name).write_text("\n".join([head, *body, "</svg>"]) + "\n")


def main() -> None:
    found = rows()
    write(
        "scaling-routing.svg",
        *(
            (f"{kind}: prefix cache hits", "share of prompt tokens", lines(found, kind, lambda r: r["hit_rate"]), False)
            for kind in ("shared-prefix", "multi-turn")
        ),
        *(
            (f"{kind}: time to first token, p50", "ms", lines(found, kind, lambda r: r["ttft_ms"]["p50"]), True)
            for kind in ("shared-prefix", "multi-turn")
        ),
    )
    mine = [row for row in found if row["routing"] == "cache-aware" and row["traffic"] == "shared-prefix"]
    links = sorted({link for row in mine for link in row["messages_per_s"]})
    messages = [
        Line(link, [(r["ranks"], r["messages_per_s"][link]) for r in mine if link in r["messages_per_s"]])
        for link in links
    ]
    cost = [
        Line("handle()", [(r["ranks"], r["coordinator"]["handle_us_per_request"]) for r in mine]),
        Line("encoding and decoding", [(r["ranks"], r["coordinator"]["codec_us_per_request"]) for r in mine]),
    ]
    write(
        "scaling-coordinator.svg",
        ("messages, cache-aware, shared-prefix", "messages a second", messages, True),
        ("coordinator's CPU time of a request", "µs", cost, False),
    )


if __name__ == "__main__":
    main()
