"""How long clients wait when a process is killed, by role: one kill at a time, in a mesh that is whole and steady.

    python -P benchmarks/pauses.py [--rounds 5] [--streams 16] [--json FILE] [--model FOLDER] [any other flag of `meshlm serve`]

The fake device with steps of 10 ms; --model gives the tokenizer (its vocabulary is most of a detokenizer's start). Each round kills one
process of each role. Reported, in seconds: `pause`, the longest gap between two tokens of any running stream around the kill (streams
have Idempotency-Keys, so they go on after a frontend's death); `new_request`, from a connect right after the kill to the first token of
a new request, tried again every 20 ms while there is no connection; `replaced`, until the supervisor says that another process has the
place and is ready. chaos.py kills all the time and compares every token; here the times are the point.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness
from harness import Mesh, Process
from streams import Ask, Stream

ROLES = ("detokenizer", "scheduler", "coordinator", "worker", "frontend")
STEADY_S = 3.2  # a process that lived so long is started again without backoff
SETTLE_S = 6.0  # standbys are loaded two seconds after the mesh is ready
POLL_S = 0.01
LIMIT_S = 60.0
NEW_AFTER_S = 0.02
MIN_GAP_S = 0.03


def ask(number: int, num_tokens: int) -> Ask:
    prompt = [300 + number % 1000] * 40
    body = {"prompt": prompt, "max_tokens": num_tokens, "stream": True, "return_token_ids": True, "ignore_eos": True}
    return Ask(number, body)


class Pauses:
    """Streams without an end, and what kills cost them."""

    def __init__(self, mesh: Mesh, arguments: argparse.Namespace) -> None:
        self.mesh, self.dice = mesh, random.Random(arguments.seed)
        self.arguments = arguments
        self.streams: set[Stream] = set()
        self.found: dict[str, dict[str, list[float]]] = {}
        self._next = 0

    async def client(self) -> None:
        while True:
            self._next += 1
            stream = Stream(self.mesh.port, ask(self._next, 3000), keep_gap_s=MIN_GAP_S)
            self.streams.add(stream)
            answer = await stream.run()
            self.streams.discard(stream)
            if answer.error:
                raise SystemExit(f"a stream failed: {answer.error}")

    async def new_request(self) -> float:
        """Seconds to the first token of a request that comes now."""
        await asyncio.sleep(NEW_AFTER_S)
        begun = time.monotonic()
        while True:
            stream = Stream(self.mesh.port, ask(0, 1), keyed=False)
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                async with asyncio.timeout(LIMIT_S):
                    await stream._connection()
            if stream.token_ids:
                return stream.last_at - begun
            await asyncio.sleep(0.02)

    async def kill(self, process: Process) -> dict[str, float]:
        at = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        asked = asyncio.create_task(self.new_request())
        replaced = 0.0
        while not (replaced and asked.done() and self._flowing(at + NEW_AFTER_S)):
            if not replaced and await self._replaced(process):
                replaced = time.monotonic() - at
            if time.monotonic() - at > LIMIT_S:
                raise SystemExit(f"after the death of {process.name} all was not well for {LIMIT_S:.0f} s")
            await asyncio.sleep(POLL_S)
        fresh = asked.result()
        gaps = [gap.end - gap.begin for s in self.streams for gap in s.gaps if gap.begin <= at + NEW_AFTER_S < gap.end]
        return {"pause": max(gaps, default=0.0), "new_request": fresh, "replaced": replaced}

    def _flowing(self, since: float) -> bool:
        return len(self.streams) == self.arguments.streams and all(stream.last_at > since for stream in self.streams)

    async def _replaced(self, process: Process) -> bool:
        now = {one.name: one for one in await asyncio.to_thread(self.mesh.processes)}.get(process.name)
        return now is not None and now.state == "ready" and now.pid != process.pid

    async def run(self) -> None:
        clients = [asyncio.create_task(self.client()) for _ in range(self.arguments.streams)]
        await asyncio.sleep(SETTLE_S)
        for _ in range(self.arguments.rounds):
            for role in self.arguments.roles:
                await asyncio.sleep(STEADY_S / len(ROLES) + 0.3 * self.dice.random())
                process = self.dice.choice([one for one in self.mesh.processes() if one.role == role])
                for name, value in (await self.kill(process)).items():
                    self.found.setdefault(role, {}).setdefault(name, []).append(value)
        for client in clients:
            client.cancel()

    def report(self) -> dict[str, dict[str, dict[str, float]]]:
        return {role: {name: spread(values) for name, values in found.items()} for role, found in self.found.items()}


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "longest": round(max(values), 3)}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--roles", nargs="+", choices=ROLES, default=list(ROLES))
    parser.add_argument("--model", help="folder with a tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    arguments, rest = parser.parse_known_args()
    flags = ["--device", "fake", "--fake-step-ms", "10", "--max-model-len", "4096", "--max-restarts", "100000"]
    with Mesh([*([arguments.model] if arguments.model else []), *flags, *rest]) as mesh:
        pauses = Pauses(mesh, arguments)
        asyncio.run(pauses.run())
        report: dict[str, Any] = {"pauses_s": pauses.report(), "rss_mib": mesh.rss_mib()}
    report |= {"rounds": arguments.rounds, "streams": arguments.streams, "tokenizer": Path(arguments.model or "").name}
    harness.keep(arguments.json, report)
    for role, found in report["pauses_s"].items():
        print(f"{role:12}", "  ".join(f"{name} {v['median']:.3f} ({v['longest']:.3f})" for name, v in found.items()))
    print(report["rss_mib"])


if __name__ == "__main__":
    main()
