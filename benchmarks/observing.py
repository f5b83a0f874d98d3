"""What looking at a mesh costs it: CPU µs per token of all its processes while nobody looks, while it is scraped each second with a
dashboard open, and with a trace of each request.

    python -P benchmarks/observing.py [--streams 200] [--tokens 200] [--step-ms 20] [--rounds 6] [--turn 1.8] [--json FILE]

Two meshes with the fake device run side by side, one of which sends its traces to a collector in this process; only one at a time has
requests. Turns alternate, and each round has another order, so what else the machine does falls on all alike: a turn's CPU seconds
are those of the mesh's own processes (schedstat), not of the wall clock. The client is in this process and is not counted.
"""

import argparse
import asyncio
import contextlib
import functools
import http.server
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import control_plane
import dashboard

MODES = ("alone", "looked at", "traced")
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


class Running(NamedTuple):
    """A mesh: where it listens, and its processes."""

    port: int
    pids: dict[str, int]

    def seconds(self) -> float:
        return sum(map(control_plane.run_seconds, self.pids.values()))


@contextlib.contextmanager
def mesh(*flags: str, **variables: str) -> Iterator[Running]:
    port, run_dir = control_plane.free_port(), tempfile.mkdtemp(prefix="mlm")
    words = ["serve", "--device", "fake", "--port", str(port), "--run-dir", run_dir, "--disable-log-requests", *flags]
    server = subprocess.Popen(
        [control_plane.MESHLM, *words], stderr=subprocess.PIPE, text=True, cwd="/", env={**os.environ, **variables}
    )
    assert server.stderr is not None
    try:
        if not any("ready: http" in line for line in server.stderr):
            sys.exit("observing: the mesh does not start")
        ask = [control_plane.MESHLM, "status", "--json", "--run-dir", run_dir]
        status = json.loads(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)
        yield Running(port, {f"{one['role']}/{one['index']}": one["pid"] for one in status["processes"]})
    finally:
        server.terminate()
        server.wait(timeout=60)
        server.stderr.close()


async def streams(port: int, count: int, tokens: int) -> list["asyncio.Task[None]"]:
    """So many streams, each of one request after the other, that do not end together."""

    async def one(number: int) -> None:
        length = 1 + (number * tokens) // count  # the first
        while True:
            body = {"prompt": [300 + number] * 32, "max_tokens": length, "ignore_eos": True, "stream": True}
            make = functools.partial(control_plane.Reader, json.dumps(body).encode())
            transport, reader = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", port)
            try:
                await reader.done
            finally:
                transport.abort()
            length = tokens

    return [asyncio.ensure_future(one(number)) for number in range(count)]


async def scraped(port: int) -> None:
    while True:
        await dashboard.num_tokens(port)
        await asyncio.sleep(1)


async def turn(mode: str, found: Running, arguments: argparse.Namespace) -> tuple[float, float]:
    """CPU µs per token of all processes, and tokens a second."""
    tasks = await streams(found.port, arguments.streams, arguments.tokens)
    watcher = None
    if mode == "looked at":
        watcher = (await asyncio.get_running_loop().create_connection(dashboard.Watcher, "127.0.0.1", found.port))[1]
        tasks.append(asyncio.ensure_future(scraped(found.port)))
    await asyncio.sleep(SETTLE_S)
    count, begun, before = await dashboard.num_tokens(found.port), time.perf_counter(), found.seconds()
    await asyncio.sleep(arguments.turn)
    used, seconds, count = (
        found.seconds() - before,
        time.perf_counter() - begun,
        await dashboard.num_tokens(found.port) - count,
    )
    if watcher is not None:
        watcher.transport.abort()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(PAUSE_S)
    return used * 1e6 / count, count / seconds


async def rounds(plain: Running, traced: Running, arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    pace = []
    for number in range(arguments.rounds):
        for place in range(len(MODES)):
            mode = MODES[(number + place) % len(MODES)]
            cost, rate = await turn(mode, traced if mode == "traced" else plain, arguments)
            found[mode].append(round(cost, 3))
            pace.append(rate)
    return {
        "streams": arguments.streams,
        "tokens_of_a_request": arguments.tokens,
        "step_ms": arguments.step_ms,
        "tokens_per_s": round(statistics.mean(pace)),
        "cpu_us_per_token": found,
    }


def over_alone(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """How much more a token costs than in the same round with nobody looking: the mean over the rounds of all parts, and its error."""
    every = {mode: [cost for part in parts for cost in part["cpu_us_per_token"][mode]] for mode in MODES}
    found: dict[str, Any] = {
        "rounds": len(every["alone"]),
        "alone_us_per_token": round(statistics.median(every["alone"]), 2),
    }
    for mode in MODES[1:]:
        ratios = [cost / alone for cost, alone in zip(every[mode], every["alone"], strict=True)]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        found[mode] = {"mean": round(statistics.mean(ratios), 4), "standard_error": round(error, 4)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200, help="of each request")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turn", type=float, default=1.8, help="seconds of each measurement")
    parser.add_argument("--json", help="file for the results; a part that it has already counts, too")
    arguments = parser.parse_args()
    file = Path(arguments.json) if arguments.json else None
    before = json.loads(file.read_text()) if file is not None and file.exists() else {}
    report: dict[str, Any] = {}
    collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    flags = ("--fake-step-ms", str(arguments.step_ms), "--max-model-len", "4096")
    where = ("--otlp-traces-endpoint", f"http://127.0.0.1:{collector.server_port}/v1/traces")
    http_ = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    with mesh(*flags) as plain, mesh(*flags, *where, **http_) as traced:
        part = asyncio.run(rounds(plain, traced, arguments))
    parts = [*before.get("parts", []), {**part, "trace_bytes": Collector.num_bytes}]
    report |= {"parts": parts, "over_alone": over_alone(parts)}
    print(json.dumps({key: value for key, value in report.items() if key != "parts"}, indent=2))
    if file is not None:
        file.write_text(json.dumps({**before, "machine": control_plane.machine(), **report}, indent=2) + "\n")


if __name__ == "__main__":
    main()
