"""What the dashboard costs, and how soon it is there.

    python -P benchmarks/dashboard.py [--streams 1000] [--step-ms 50] [--rounds 12] [--json FILE] [--shots FOLDER]

One mesh with the fake device decodes --streams streams. A client that reads the dashboard's events comes and goes every --turn
seconds, and the CPU time per token of all processes but the worker is compared between the turns with it and those without: the
machine's speed changes from second to second, the difference between neighbours less. Then `meshlm top` runs in a terminal for some
seconds, and a headless Chromium (tests/browser) opens the page. The client of the streams is this process; its CPU is not counted.
"""

import argparse
import asyncio
import contextlib
import fcntl
import functools
import json
import os
import pty
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests" / "shared")]
import control_plane  # noqa: E402

TOP_S, IDLE_S = 15.0, 4.0
COLD_BROWSERS = 6


class Watcher(asyncio.Protocol):
    """Reads the dashboard's events; counts them."""

    def __init__(self) -> None:
        self.events = self.num_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(b"GET /dashboard/events HTTP/1.1\r\nHost: localhost\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        self.events += data.count(b"data: {")
        self.num_bytes += len(data)


async def stream(port: int, number: int) -> None:
    """One request after the other, for ever."""
    body = {"prompt": [300 + number] * 32, "max_tokens": 3900, "ignore_eos": True, "stream": True}
    while True:
        make = functools.partial(control_plane.Reader, json.dumps(body).encode())
        transport, reader = await asyncio.get_running_loop().create_connection(make, "127.0.0.1", port)
        try:
            await reader.done
        finally:
            transport.abort()


async def num_tokens(port: int) -> float:
    """The tokens that clients have had, which the frontend counts."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("meshlm:generation_tokens_total{"))


async def turns(port: int, pids: dict[str, int], arguments: argparse.Namespace) -> dict[str, Any]:
    """CPU µs per token with a watcher and without, turn by turn."""
    loop = asyncio.get_running_loop()
    idle: dict[bool, float] = {}
    for watched in (False, True):
        watcher = (await loop.create_connection(Watcher, "127.0.0.1", port))[1] if watched else None
        await asyncio.sleep(0.5)
        before = sum(map(control_plane.run_seconds, pids.values()))
        await asyncio.sleep(IDLE_S)
        idle[watched] = (sum(map(control_plane.run_seconds, pids.values())) - before) / IDLE_S
        if watcher is not None:
            watcher.transport.abort()
    streams = [loop.create_task(stream(port, number)) for number in range(arguments.streams)]
    await asyncio.sleep(5)
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    events, num_bytes = 0, 0
    order = [
        watched for number in range(arguments.rounds) for watched in ((True, False) if number % 2 else (False, True))
    ]
    for watched in order:
        watcher = None
        if watched:
            _, watcher = await loop.create_connection(Watcher, "127.0.0.1", port)
        await asyncio.sleep(0.3)
        begun, count = time.perf_counter(), await num_tokens(port)
        ran = {name: control_plane.run_seconds(pid) for name, pid in pids.items()}
        seen = watcher.events if watcher is not None else 0
        await asyncio.sleep(arguments.turn)
        used = {name: control_plane.run_seconds(pid) - ran[name] for name, pid in pids.items()}
        seconds, count = time.perf_counter() - begun, await num_tokens(port) - count
        found[watched].append(
            {**{name: value * 1e6 / count for name, value in used.items()}, "tokens/s": count / seconds}
        )
        if watcher is not None:
            events, num_bytes = events + watcher.events - seen, num_bytes + watcher.num_bytes
            watcher.transport.abort()
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    plane = {
        key: [control_plane.plane_of({n: v for n, v in one.items() if "/" in n and n[0] != "t"}) for one in ones]
        for key, ones in found.items()
    }
    ratios = [on / off for on, off in zip(plane[True], plane[False], strict=True)]
    pace = statistics.mean(one["tokens/s"] for one in found[False])
    extra = (statistics.mean(plane[True]) - statistics.mean(plane[False])) * pace / 1e6
    means = {
        key: {name: round(statistics.mean(one[name] for one in ones), 3) for name in ones[0]}
        for key, ones in found.items()
    }
    return {
        "share_of_a_core_without_requests": round(idle[True] - idle[False], 4),
        "share_of_a_core_with_streams": round(extra, 4),
        "streams": arguments.streams,
        "step_ms": arguments.step_ms,
        "events_per_s": round(events / (arguments.rounds * arguments.turn), 1),
        "event_bytes": round(num_bytes / max(1, events)),
        "cpu_us_per_token_closed": means[False],
        "cpu_us_per_token_open": means[True],
        "plane_open_over_closed_median": round(statistics.median(ratios), 4),
        "plane_open_over_closed_mean": round(statistics.mean(plane[True]) / statistics.mean(plane[False]), 4),
    }


def top_share(port: int) -> float:
    """The share of a core that `meshlm top` takes in a terminal of 180 x 50."""
    pid, terminal = pty.fork()
    if not pid:
        os.execv(control_plane.MESHLM, ["meshlm", "top", "--port", str(port)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 180, 0, 0))

    def read() -> None:
        with contextlib.suppress(OSError):  # it has ended
            while os.read(terminal, 1 << 16):
                pass

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    time.sleep(3)
    before = control_plane.run_seconds(pid)
    time.sleep(TOP_S)
    share = (control_plane.run_seconds(pid) - before) / TOP_S
    os.kill(pid, signal.SIGINT)
    os.waitpid(pid, 0)
    os.close(terminal)
    reader.join(timeout=5)
    return round(share, 4)


def paints(port: int, shots: Path | None) -> dict[str, Any]:
    """Milliseconds to the first paint: in browsers that have only just begun, and then again in the same ones."""
    from browser import Browser

    paint = "Math.round(performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0)"
    cold: list[float] = []
    warm: list[float] = []
    for number in range(COLD_BROWSERS):
        browser = Browser()
        try:
            for found in (cold, warm):
                browser.open(f"http://127.0.0.1:{port}/dashboard")
                found.append(browser.until(paint))
            if shots is not None and number == 0:
                take(browser, port, shots)
        finally:
            browser.close()
    return {"cold": cold, "cold_median": statistics.median(cold), "warm": warm, "warm_median": statistics.median(warm)}


def take(browser: Any, port: int, folder: Path) -> None:
    """Screenshots for the documentation: light, dark, and as wide as a phone."""
    url = f"http://127.0.0.1:{port}/dashboard"
    for name, theme, width, height in (
        ("light", "light", 1440, 1180),
        ("dark", "dark", 1440, 1180),
        ("phone", "light", 400, 860),
    ):
        browser.size(width, height)
        browser.run(f"localStorage.setItem('meshlm.theme', '{theme}')")
        browser.open(url)
        browser.until("feed.latest && feed.latest.number > 60", limit_s=30)
        browser.shot(folder / f"dashboard-{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--turn", type=float, default=1.5, help="seconds of each measurement")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--skip", nargs="*", default=[], choices=["turns", "top", "paint"])
    arguments = parser.parse_args()
    port, run_dir = control_plane.free_port(), tempfile.mkdtemp(prefix="mlm")
    flags = ["--device", "fake", "--port", str(port), "--run-dir", run_dir, "--disable-log-requests"]
    flags += [
        "--fake-step-ms",
        str(arguments.step_ms),
        "--max-model-len",
        "4096",
        "--max-num-seqs",
        str(arguments.streams),
    ]
    server = subprocess.Popen([control_plane.MESHLM, "serve", *flags], stderr=subprocess.PIPE, text=True, cwd="/")
    assert server.stderr is not None
    for line in server.stderr:
        if "ready: http" in line:
            break
    report: dict[str, Any] = {"machine": control_plane.machine()}
    from meshlm.frontend.dashboard.routes import page

    report["page_bytes"] = {"plain": len(page().content), "gzip": len(page().compressed)}
    try:
        ask = [control_plane.MESHLM, "status", "--json", "--run-dir", run_dir]
        processes = json.loads(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)["processes"]
        pids = {f"{p['role']}/{p['index']}": p["pid"] for p in processes}
        if "paint" not in arguments.skip:
            report["first_paint_ms"] = paints(port, None)
        if "turns" not in arguments.skip:
            report["dashboard"] = asyncio.run(turns(port, pids, arguments))
        if "top" not in arguments.skip:
            report["top_share_of_a_core"] = top_share(port)
    finally:
        for _ in range(2):  # the second one: do not wait for streams
            server.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        server.wait(timeout=30)
        server.stderr.close()
    print(json.dumps(report, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
