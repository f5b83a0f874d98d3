"""Mixed traffic with aborts for a long time; resident memory of each process, and its slope by least squares.

    python -P benchmarks/soak.py --minutes 30 --json FILE [--streams 32] [--device fake|cpu] [any other flag of `meshlm serve`]

Greedy and seeded streams, stop strings, clients that hang up in the middle, refused requests, /tokenize. The first `--settle`
share of the time is not counted: interpreters and caches fill.
"""

import argparse
import asyncio
import http.client
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness
from harness import Mesh
from streams import Stream, draw_asks

SAMPLE_S = 2.0
ABORTED_SHARE = 0.25
BAD_BODIES = (b'{"prompt": ""}', b'{"prompt": "x", "temperature": -1}', b"{", b'{"prompt": [99999999]}')


class Soak:
    """The traffic and the samples."""

    def __init__(self, mesh: Mesh, arguments: argparse.Namespace) -> None:
        self.mesh, self.arguments = mesh, arguments
        self.counts: Counter[str] = Counter()
        self.samples: dict[str, list[tuple[float, int]]] = {}
        self.begun = time.monotonic()
        self.until = self.begun + 60 * arguments.minutes

    async def client(self, number: int) -> None:
        """Another request each time: no prompt comes twice, so caches that never forget would show."""
        dice = random.Random(number)
        turn = 0
        while time.monotonic() < self.until:
            turn += 1
            (ask,) = draw_asks(1, number * 1_000_003 + turn, (4, 160), self.arguments.device)
            leaves = dice.random() < ABORTED_SHARE
            # With a key a request whose client hangs up would run on, for the client to come back.
            stream = Stream(
                self.mesh.port, ask, dice.randint(0, 40) if leaves else -1, keyed=not leaves and turn % 2 == 0
            )
            answer = await stream.run()
            kind = "aborted" if stream.left else "failed" if answer.error else "done"
            self.counts[kind] += 1
            self.counts["tokens"] += len(answer.token_ids)
            if answer.error:
                print(answer.error, file=sys.stderr)

    async def nuisance(self) -> None:
        """Requests that are refused, and others that are no completions."""
        dice = random.Random(0)
        while time.monotonic() < self.until:
            await asyncio.to_thread(self._post, "/v1/completions", dice.choice(BAD_BODIES))
            await asyncio.to_thread(self._post, "/tokenize", b'{"prompt": "%d"}' % dice.getrandbits(60))
            self.counts["others"] += 2
            await asyncio.sleep(0.1)

    def _post(self, path: str, body: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.mesh.port, timeout=30)
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            connection.getresponse().read()
        finally:
            connection.close()

    async def watch(self) -> None:
        told = self.begun
        while (now := time.monotonic()) < self.until:
            for process in await asyncio.to_thread(self.mesh.processes):
                self.samples.setdefault(process.name, []).append((now - self.begun, process.rss_bytes))
            if now - told > 30:
                told = now
                print(f"{self.until - now:5.0f} s left, {dict(self.counts)}", file=sys.stderr)
            await asyncio.sleep(SAMPLE_S)

    async def run(self) -> None:
        clients = (self.client(number) for number in range(self.arguments.streams))
        await asyncio.gather(*clients, self.nuisance(), self.watch())

    def report(self) -> dict[str, Any]:
        settled = 60 * self.arguments.minutes * self.arguments.settle
        return {
            "minutes": self.arguments.minutes,
            "requests": dict(self.counts),
            "memory": {name: memory(samples, settled) for name, samples in self.samples.items()},
        }


def memory(samples: list[tuple[float, int]], settled_s: float) -> dict[str, Any]:
    """First and last in MB; the slope after `settled_s` in MB per minute."""
    counted = [(at / 60, rss / 1e6) for at, rss in samples if at >= settled_s]
    return {
        "first_mb": round(samples[0][1] / 1e6, 1),
        "settled_mb": round(counted[0][1], 1) if counted else None,
        "last_mb": round(samples[-1][1] / 1e6, 1),
        "slope_mb_per_minute": round(slope(counted), 4),
        "samples": len(counted),
    }


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares; 0 for fewer than two points."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else 0.0


async def play(arguments: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    flags = ["--device", arguments.device]
    if arguments.device == "fake":
        # A small cache is full soon: what the scheduler remembers of blocks would look like a leak until then.
        flags += ["--fake-step-ms", "5", "--max-model-len", "4096", "--kv-cache-memory", "400M"]
    with Mesh([*flags, *rest]) as mesh:
        soak = Soak(mesh, arguments)
        await soak.run()
        return soak.report()


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--device", choices=["cpu", "fake"], default="fake")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--settle", type=float, default=0.2, help="share of the time before the slope is taken")
    arguments, rest = parser.parse_known_args()
    report = asyncio.run(play(arguments, rest))
    harness.keep(arguments.json, report)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
