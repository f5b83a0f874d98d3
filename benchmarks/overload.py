"""Overload: a mesh with the fake device, offered 1, 2 and 10 times what it can take. What runs must keep its pace.

    python -P benchmarks/overload.py [--seconds 10] [--step-ms 10] [--max-num-seqs 32] [--max-waiting 64] [--json FILE]

The sustainable load is measured first (as many streams as the scheduler runs, one after the other). Then requests arrive at random
(Poisson, seeded) for --seconds at each level, each on its own connection. Reported: inter-token latency (ITL) and time to first
token (TTFT) of what was served, the share that got 503 and how soon, and the resident memory of each process afterwards. "How soon" is
measured twice: by the client, from the end of its connect, and by the frontend, from the first byte of the head that it reads (its
histogram meshlm:request_refusal_seconds, so the figure is the upper end of a bucket); what lies between them waits in the kernel for
the frontend, or for the client. The client is one process on the same machine, so its own CPU is part of what the mesh competes with.

With --attacks it is attacked.py instead: honest streams beside hostile clients.
"""

import argparse
import asyncio
import json
import random
import sys
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness
from harness import KeptStream, Mesh, cpu_seconds, milliseconds

LEVELS = (1, 2, 10)
SHARES = (("p50_below", 0.5), ("p99_below", 0.99))
LIMIT_S = 60.0  # after the last arrival, until the last answer


class Load:
    """Sends requests of one shape to one port."""

    def __init__(self, port: int, num_tokens: int, seed: int) -> None:
        self._port, self._num_tokens = port, num_tokens
        self.dice = random.Random(seed)

    async def one(self) -> KeptStream:
        prompt = [self.dice.randrange(300, 40_000) for _ in range(32)]
        return await KeptStream.begin(self._port, {"prompt": prompt, "max_tokens": self._num_tokens})

    async def sustainable(self, streams: int, rounds: int = 4) -> float:
        """Requests a second when as many run as the scheduler takes."""

        async def stream() -> None:
            for _ in range(rounds):
                await (await self.one()).done

        begun = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        return streams * rounds / (time.perf_counter() - begun)

    async def offered(self, rate: float, seconds: float) -> list[KeptStream]:
        """Arrivals that wait for nobody."""
        tasks: list[asyncio.Task[KeptStream]] = []
        begun = due = time.perf_counter()
        while due < begun + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.ensure_future(self.one()))
            due += self.dice.expovariate(rate)
        requests = list(await asyncio.gather(*tasks))
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(request.done for request in requests))
        return requests


def report(level: float, rate: float, requests: list[KeptStream]) -> dict[str, Any]:
    served = [request for request in requests if request.status == 200]
    refused = [request for request in requests if request.status == 503]
    return {
        "load": level,
        "offered_per_s": round(rate, 1),
        "requests": len(requests),
        "served": len(served),
        "broken": sum(not request.complete for request in served),
        "refused_share": round(len(refused) / len(requests), 4),
        "refused_without_retry_after": sum(b"retry-after:" not in request.data.lower() for request in refused),
        "other": len(requests) - len(served) - len(refused),
        "itl_ms": milliseconds([b - a for request in served for a, b in pairwise(request.times)]),
        "ttft_ms": milliseconds([request.times[0] - request.begun for request in served if request.times]),
        "refusal_ms": milliseconds([request.answered - request.begun for request in refused]),
    }


def refusals(port: int) -> dict[float, float]:
    """Upper end of a bucket in seconds -> refusals so far that took no longer, as the frontend counted them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = {}
    for line in lines:
        if line.startswith("meshlm:request_refusal_seconds_bucket"):
            found[float(line.partition('le="')[2].partition('"')[0])] = float(line.rpartition(" ")[2])
    return found


def bounds(before: dict[float, float], after: dict[float, float]) -> dict[str, float] | None:
    """Milliseconds within which half of the refusals, and 99 of 100, were answered."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = max(counts.values(), default=0.0)
    if not total:
        return None
    within = {name: next(bound for bound, count in counts.items() if count >= share * total) for name, share in SHARES}
    return {"count": total, **{name: round(1e3 * bound, 2) for name, bound in within.items()}}


async def measure(arguments: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    load = Load(mesh.port, arguments.tokens, arguments.seed)
    await load.sustainable(arguments.max_num_seqs, 1)  # everything has been touched once
    rate = await load.sustainable(arguments.max_num_seqs)
    found, pids, rss = [], mesh.pids(), mesh.rss_mib()
    for level in LEVELS:
        refused, before = refusals(mesh.port), {name: cpu_seconds(pid) for name, pid in pids.items()}
        begun, used = time.perf_counter(), time.process_time()
        result = report(level, level * rate, await load.offered(level * rate, arguments.seconds))
        wall = time.perf_counter() - begun
        result["refusal_by_frontend_ms"] = bounds(refused, refusals(mesh.port))
        result["rss_mib"] = mesh.rss_mib()
        cores = {name: round((cpu_seconds(pid) - before[name]) / wall, 2) for name, pid in pids.items()}
        result["cores_used"] = {**cores, "client": round((time.process_time() - used) / wall, 2)}
        result["seconds_until_idle"] = round(wall, 1)
        print(json.dumps(result), file=sys.stderr, flush=True)
        found.append(result)
    return {"sustainable_per_s": round(rate, 1), "rss_mib_before": rss, "levels": found}


def main() -> None:
    if sys.argv[1:2] == ["--attacks"]:
        from attacked import main as attacked

        attacked(sys.argv[2:])
        return
    parser = harness.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals at each level")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=50, help="output tokens of a request")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-waiting", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    flags = ["--device", "fake", "--fake-step-ms", str(arguments.step_ms), "--max-model-len", "4096"]
    flags += ["--max-num-seqs", str(arguments.max_num_seqs), "--max-waiting", str(arguments.max_waiting)]
    with Mesh(flags) as mesh:
        result = asyncio.run(measure(arguments, mesh))
    print(json.dumps(result, indent=1))
    harness.keep(arguments.json, result)


if __name__ == "__main__":
    main()
