"""What looking at a mesh costs it: CPU of all its processes while nobody looks, while a dashboard is open and it is scraped as
deploy/monitoring/prometheus.yml says, and with a trace of each request.

    python -P benchmarks/observing.py [--modes alone looked-at traced] [--streams 200] [--tokens 200] [--step-ms 20] [--rounds 6]
                                      [--turn 1.8] [--scrape-every 5] [--json FILE]

Two meshes with the fake device run side by side, one of which sends its traces to a collector in this process; only one at a time has
requests. Without `traced` there is one mesh, whose streams go on from turn to turn. Turns alternate, and each round has another order,
so what else the machine does falls on all alike: a turn's CPU seconds are those of the mesh's own processes (schedstat), not of the
wall clock. The client is in this process and is not counted.

A dashboard and scrapes cost so much a second, whatever else the mesh does, and a token costs several times as much on a busy machine
as on an idle one. So the first is measured where there are as many requests as else and few tokens (--step-ms 500 --tokens 24): what
it takes there more than alone (`extra_ms_per_s`) is known to a few hundredths of a percent of a core.
"""

import argparse
import asyncio
import contextlib
import http.server
import json
import random
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness
from harness import Mesh, Stream, run_seconds

MODES = ("alone", "looked-at", "traced")
PAUSE_S, SETTLE_S = 0.2, 0.4


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes all traces and keeps none."""

    num_bytes = 0

    def do_POST(self) -> None:
        Collector.num_bytes += len(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Nobody reads it."""


class Counted(Stream):
    """Counts the tokens of all streams: each is an event."""

    num_tokens = 0

    def data_received(self, data: bytes) -> None:
        Counted.num_tokens += data.count(b"data: {")


class Watcher(Stream):
    """A dashboard that is open: it reads the events."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")


async def scrape(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    await reader.read()
    writer.close()


class Streams:
    """So many streams at one mesh at a time, each of one request after the other, that do not end together."""

    def __init__(self, count: int, tokens: int) -> None:
        self._count, self._tokens = count, tokens
        self._port = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def at(self, port: int) -> None:
        """They go on where they are, or end there and begin at this one; 0 is none."""
        if port == self._port:
            return
        self._port = port
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(PAUSE_S)
        self._tasks = [asyncio.ensure_future(self._one(port, number)) for number in range(self._count if port else 0)]
        await asyncio.sleep(PAUSE_S)

    async def _one(self, port: int, number: int) -> None:
        length = 1 + (number * self._tokens) // self._count  # the first
        while True:
            stream = await Counted.begin(port, {"prompt": [300 + number] * 32, "max_tokens": length})
            try:
                await stream.done
            finally:
                stream.transport.abort()
            length = self._tokens


class Turns:
    """Turns of measuring, one after the other."""

    def __init__(self, arguments: argparse.Namespace, meshes: dict[str, Mesh]) -> None:
        self._arguments = arguments
        self._pids = {mesh.port: mesh.pids() for mesh in meshes.values()}
        self.streams = Streams(arguments.streams, arguments.tokens)
        self._looked_s = 0.0  # of which no scrape has been made

    async def turn(self, mode: str, found: Mesh) -> tuple[dict[str, float], float]:
        """CPU ms a second of each process, and tokens a second."""
        await self.streams.at(found.port)
        watcher = await Watcher.begin(found.port, {}) if mode == "looked-at" else None
        await asyncio.sleep(SETTLE_S)
        count, begun, before = Counted.num_tokens, time.perf_counter(), self._seconds(found)
        await asyncio.sleep(self._arguments.turn / 2)
        if watcher is not None:
            await self._scrape(found.port)
        await asyncio.sleep(begun + self._arguments.turn - time.perf_counter())
        after, seconds = self._seconds(found), time.perf_counter() - begun
        count = Counted.num_tokens - count
        if watcher is not None:
            watcher.transport.abort()
        return {name: (after[name] - before[name]) * 1e3 / seconds for name in after}, count / seconds

    def _seconds(self, mesh: Mesh) -> dict[str, float]:
        return {name: run_seconds(pid) for name, pid in self._pids[mesh.port].items()}

    async def _scrape(self, port: int) -> None:
        """Where the turns that were looked at make up the time between two scrapes."""
        self._looked_s += self._arguments.turn
        if self._looked_s >= self._arguments.scrape_every:
            self._looked_s -= self._arguments.scrape_every
            await scrape(port)


async def rounds(meshes: dict[str, Mesh], arguments: argparse.Namespace) -> dict[str, Any]:
    modes = list(meshes)
    found: dict[str, list[tuple[dict[str, float], float]]] = {mode: [] for mode in modes}
    turns = Turns(arguments, meshes)
    await turns.turn(modes[0], meshes[modes[0]])  # all is imported, and the streams no longer end together
    for number in range(arguments.rounds):
        for turn in range(len(modes)):
            mode = modes[(number + turn) % len(modes)]
            found[mode].append(await turns.turn(mode, meshes[mode]))
    await turns.streams.at(0)
    whole = {mode: [(sum(used.values()), pace) for used, pace in ones] for mode, ones in found.items()}
    return {
        "arguments": {name: value for name, value in vars(arguments).items() if name != "json"},
        "tokens_per_s": round(statistics.mean(pace for ones in whole.values() for _, pace in ones)),
        "median_ms_per_s_of_each_process": {
            mode: {name: round(statistics.median(used[name] for used, _ in ones), 2) for name in ones[0][0]}
            for mode, ones in found.items()
        },
        "cpu_ms_per_s": {mode: [round(used, 2) for used, _ in ones] for mode, ones in whole.items()},
        "cpu_us_per_token": {
            mode: [round(used * 1e3 / max(pace, 1.0), 2) for used, pace in ones] for mode, ones in whole.items()
        },
    }


def middle(values: list[float]) -> dict[str, float]:
    """The mean of the middle 80 %, and its error by resampling: a busy machine makes single turns of any kind several times as dear."""

    def trimmed(some: list[float]) -> float:
        cut = len(some) // 10
        return statistics.mean(sorted(some)[cut : len(some) - cut])

    draws = random.Random(1)
    again = [trimmed(draws.choices(values, k=len(values))) for _ in range(1000)]
    return {
        "mean_of_middle_80_percent": round(trimmed(values), 4),
        "standard_error": round(statistics.stdev(again), 4),
        "median": round(statistics.median(values), 4),
    }


def over_alone(found: dict[str, Any], mode: str) -> dict[str, Any]:
    """How much more it takes than in the same round with nobody looking."""

    def pairs(key: str) -> list[tuple[float, float]]:
        return list(zip(found[key][mode], found[key]["alone"], strict=True))

    return {
        "rounds": len(pairs("cpu_ms_per_s")),
        "extra_ms_per_s": middle([here - alone for here, alone in pairs("cpu_ms_per_s")]),
        "ratio_per_token": middle([here / alone for here, alone in pairs("cpu_us_per_token")]),
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200, help="of each request")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turn", type=float, default=1.8, help="seconds of each measurement")
    parser.add_argument("--scrape-every", type=float, default=5.0, help="seconds between two scrapes")
    arguments = parser.parse_args()
    if "alone" not in arguments.modes:
        parser.error("--modes: the others are compared with `alone`")
    found = measured(arguments)
    more = {mode: over_alone(found, mode) for mode in arguments.modes if mode != "alone"}
    print(json.dumps({**more, "tokens_per_s": found["tokens_per_s"]}, indent=2))
    harness.keep(arguments.json, {"over_alone": more, **found})


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    flags = ["--device", "fake", "--fake-step-ms", str(arguments.step_ms), "--max-model-len", "4096"]
    with contextlib.ExitStack() as until_done:
        meshes = dict.fromkeys(
            [mode for mode in arguments.modes if mode != "traced"], until_done.enter_context(Mesh(flags))
        )
        if "traced" not in arguments.modes:
            return asyncio.run(rounds(meshes, arguments))
        collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        where = ["--otlp-traces-endpoint", f"http://127.0.0.1:{collector.server_port}/v1/traces"]
        traced = Mesh([*flags, *where], OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf")
        meshes["traced"] = until_done.enter_context(traced)
        return {**asyncio.run(rounds(meshes, arguments)), "trace_bytes": Collector.num_bytes}


if __name__ == "__main__":
    main()
