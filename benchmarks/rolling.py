"""Weights that change under load: the longest pause of any stream while two ranks take turns, and while all change at once.

    python -P benchmarks/rolling.py [--streams 4] [--rounds 3] [--tokens 60] [--json FILE] [--model PATH] [flags of `meshlm serve`]

Each stream is followed by another one. Reported, in milliseconds: the gaps between two tokens of a stream in a steady mesh, in rolling
updates, and in updates of all ranks at once, each over the same number of updates; and how long the updates took. Each update reads the
same weights from another path, so that it is a real one.
"""

import asyncio
import shutil
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent))
import harness
from harness import KeptStream, Mesh, milliseconds

STEADY_S = 10.0


class Load:
    """Streams one after the other at each place, and the times of their tokens."""

    def __init__(self, port: int, num_tokens: int) -> None:
        self._port, self._num_tokens = port, num_tokens
        self.streams: list[KeptStream] = []
        self.ends = False

    async def place(self, number: int) -> None:
        while not self.ends:
            prompt = [300 + number + len(self.streams)] * 40
            body = {"prompt": prompt, "max_tokens": self._num_tokens, "temperature": 0}
            stream = await KeptStream.begin(self._port, body)
            self.streams.append(stream)
            await stream.done

    def gaps(self, since: float, until: float) -> dict[str, float] | None:
        """Between two tokens of one stream, of those that ended in this time."""
        times = (one.times[:-1] for one in self.streams)  # the last event has no token
        return milliseconds([b - a for one in times for a, b in pairwise(one) if since <= b <= until])


async def update(port: int, path: Path, name: str, *, rolling: bool) -> float:
    """Its seconds."""
    body: dict[str, Any] = {"model_path": str(path), "weight_version": name, "rolling": rolling}
    begun = time.perf_counter()
    async with httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(f"http://127.0.0.1:{port}/update_weights_from_disk", json=body)
    if answer.status_code != 200:
        raise SystemExit(answer.text)
    return time.perf_counter() - begun


async def measure(port: int, paths: list[Path], num_streams: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    load, report = Load(port, num_tokens), dict[str, Any]()
    places = [asyncio.ensure_future(load.place(number)) for number in range(num_streams)]
    await asyncio.sleep(STEADY_S / 2)
    begun = time.perf_counter()
    await asyncio.sleep(STEADY_S)
    report["steady"] = load.gaps(begun, time.perf_counter())
    for kind in ("rolling", "at_once"):
        begun, took = time.perf_counter(), []
        for number in range(rounds):
            took.append(await update(port, paths[number % 2], f"{kind}-{number}", rolling=kind == "rolling"))
            await asyncio.sleep(1.0)
        report[kind] = load.gaps(begun, time.perf_counter())
        report[f"{kind}_s"] = [round(one, 2) for one in took]
    load.ends = True
    await asyncio.gather(*places)
    report["streams"] = {"all": len(load.streams), "complete": sum(one.complete for one in load.streams)}
    return report


def main() -> None:
    arguments = harness.parser(__doc__)
    arguments.add_argument("--streams", type=int, default=4)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--tokens", type=int, default=60)
    arguments.add_argument("--model", type=Path)
    asked, flags = arguments.parse_known_args()
    model = asked.model or harness.smollm2()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name / model.name for name in "ab"]
        for path in paths:
            path.parent.mkdir()
            (shutil.copytree if model.is_dir() else shutil.copy)(model, path)
        with Mesh([str(model), "-dp", "2", "--server-dev-mode", *flags]) as mesh:
            report = asyncio.run(measure(mesh.port, paths, asked.streams, asked.tokens, asked.rounds))
    for name, found in report.items():
        print(f"{name:12} {found}")
    harness.keep(asked.json, report)


if __name__ == "__main__":
    main()
