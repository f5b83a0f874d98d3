"""The control plane alone: the whole mesh with the fake device, N streams, CPU µs per output token of each process.

    python -P benchmarks/control_plane.py [--streams 256] [--n 1] [--step-ms 20] [--tokens 500] [--floor] [--rounds 1] [--json FILE]

With --step-ms 20 every step's tokens leave as one chunk each; with 0 the mesh runs freely and chunks coalesce only under
back-pressure. The client is one bare socket reader in this process; its CPU is not counted.

`cpu_us_per_token` is of the whole run, with the requests' beginnings and ends; `decoding` of the half of it in which all streams do
nothing but decode. With --floor each round also measures, in the same minutes and with the same client, what this machine takes for the
sends alone and for a mesh of nothing but columns (floor.py): the machine's speed changes from day to day, the ratio less.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import floor

TICKS = os.sysconf("SC_CLK_TCK")
MESHLM = str(Path(sys.executable).parent / "meshlm")


class Reader(asyncio.Protocol):
    """One streaming request; counts events and notes the first."""

    def __init__(self, body: bytes) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.events = 0
        self.first = 0.0
        self.begun = 0.0
        self._body = body
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.begun = time.perf_counter()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        transport.write(head % len(self._body) + self._body)

    def data_received(self, data: bytes) -> None:
        count = data.count(b"data: {")
        if count and not self.first:
            self.first = time.perf_counter()
        self.events += count

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def run_seconds(pid: int) -> float:
    """What all threads of a process ran, to the nanosecond."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def load(
    port: int, streams: int, tokens: int, readers: list[Reader] | None = None, n: int = 1
) -> tuple[float, list[Reader]]:
    """All streams at once, n in each request; seconds from first to last byte. The readers appear in `readers` as they begin."""
    loop = asyncio.get_running_loop()
    readers = [] if readers is None else readers
    begun = time.perf_counter()
    for number in range(streams // n):
        body = json.dumps(
            {"prompt": [300 + number] * 32, "max_tokens": tokens, "ignore_eos": True, "stream": True, "n": n}
        ).encode()
        _, reader = await loop.create_connection(partial(Reader, body), "127.0.0.1", port)
        readers.append(reader)
    await asyncio.gather(*(reader.done for reader in readers))
    return time.perf_counter() - begun, readers


async def watched(
    port: int, streams: int, tokens: int, n: int, pids: dict[str, int]
) -> tuple[float, list[Reader], dict[str, float]]:
    """`load`, and CPU µs per token of each process while all streams decode, for streams of one token a chunk."""
    readers: list[Reader] = []
    loading = asyncio.ensure_future(load(port, streams, tokens, readers, n))

    async def count_after(share: float) -> int:
        # The readers are the measured client, and tell nobody.
        while len(readers) < streams // n or any(r.events < share * tokens * n for r in readers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return sum(reader.events for reader in readers)

    begin = await count_after(0.25)
    before = {name: run_seconds(pid) for name, pid in pids.items()}
    num_tokens = await count_after(0.75) - begin
    used = {name: (run_seconds(pid) - before[name]) * 1e6 / num_tokens for name, pid in pids.items()}
    return *await loading, used


async def first_tokens(port: int, count: int) -> list[float]:
    """TTFT in ms of single requests through the idle mesh."""
    found = []
    for _ in range(count):
        _, (reader,) = await load(port, 1, 1)
        found.append((reader.first - reader.begun) * 1e3)
    return sorted(found)


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    port, run_dir = free_port(), tempfile.mkdtemp(prefix="mlm")
    flags = ["--device", "fake", "--port", str(port), "--run-dir", run_dir, "--disable-log-requests"]
    flags += ["--fake-step-ms", str(arguments.step_ms), "--max-model-len", "4096", "--frontends", str(arguments.pairs)]
    flags += ["--detokenizers", str(arguments.pairs)]
    server = subprocess.Popen([MESHLM, "serve", *flags], stderr=subprocess.PIPE, text=True, cwd="/")
    assert server.stderr is not None
    for line in server.stderr:
        if "ready: http" in line:
            break
    try:
        ask = [MESHLM, "status", "--json", "--run-dir", run_dir]
        processes = json.loads(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)["processes"]
        ttft = asyncio.run(first_tokens(port, 100)) if not arguments.step_ms else []
        asyncio.run(load(port, arguments.streams, 20, n=arguments.n))
        before = {p["pid"]: cpu_seconds(p["pid"]) for p in processes}
        pids = {f"{p['role']}/{p['index']}": p["pid"] for p in processes}
        decoding: dict[str, float] = {}
        if arguments.step_ms:
            run = watched(port, arguments.streams, arguments.tokens, arguments.n, pids)
            elapsed, readers, decoding = asyncio.run(run)
        else:
            elapsed, readers = asyncio.run(load(port, arguments.streams, arguments.tokens, n=arguments.n))
        total = arguments.streams * arguments.tokens
        events = sum(reader.events for reader in readers)
        used = {
            f"{p['role']}/{p['index']}": (cpu_seconds(p["pid"]) - before[p["pid"]]) * 1e6 / total for p in processes
        }
        memory = {f"{p['role']}/{p['index']}": round(p["rss_bytes"] / 1e6) for p in processes}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)
        server.stderr.close()
    plane = plane_of(used)
    result: dict[str, object] = {
        "streams": arguments.streams,
        "n": arguments.n,
        "step_ms": arguments.step_ms,
        "tokens": total,
        "pairs": arguments.pairs,
        "seconds": round(elapsed, 3),
        "output_tokens_per_s": round(total / elapsed),
        "tokens_per_chunk": round(total / max(1, events), 2),
        "cpu_us_per_token": {name: round(value, 3) for name, value in used.items()},
        "cpu_us_per_token_plane": round(plane, 3),
        "output_tokens_per_s_per_core": round(1e6 / (plane + used["worker/0"])),
        "rss_mb": memory,
    }
    if decoding:
        result["decoding_us_per_token"] = {name: round(value, 3) for name, value in decoding.items()}
        result["decoding_us_per_token_plane"] = round(plane_of(decoding), 3)
    if ttft:
        result["ttft_ms"] = {"p50": round(ttft[len(ttft) // 2], 2), "p99": round(ttft[int(len(ttft) * 0.99)], 2)}
    return result


def plane_of(used: dict[str, float]) -> float:
    """All but the workers."""
    return sum(value for name, value in used.items() if not name.startswith("worker"))


def with_floor(result: dict[str, object], arguments: argparse.Namespace) -> dict[str, object]:
    """The same, beside what the machine takes at the least right now."""

    def run(port: int, streams: int, tokens: int) -> object:
        return asyncio.run(load(port, streams, tokens))

    found = floor.measure(run, arguments.streams, 300, arguments.step_ms / 1e3)
    plane = result["decoding_us_per_token_plane"]
    assert isinstance(plane, float)
    assert isinstance(found["mesh_plane"], float)
    return {**result, "floor_us_per_token": found, "times_the_floor": round(plane / found["mesh_plane"], 2)}


def machine() -> dict[str, object]:
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "cpu": names[0],
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "os": platform.release(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--n", type=int, default=1, help="streams of each request (choices); divides --streams")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[20.0, 0.0])
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--pairs", type=int, default=1, help="frontends and detokenizers")
    parser.add_argument("--floor", action="store_true", help="also measure the least (with steps of some length)")
    parser.add_argument("--rounds", type=int, default=1, help="of all measurements")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    results = []
    for step_ms in arguments.step_ms * arguments.rounds:
        one = argparse.Namespace(**{**vars(arguments), "step_ms": step_ms})
        result = measure(one)
        results.append(with_floor(result, one) if arguments.floor and step_ms else result)
        print(json.dumps(results[-1], indent=1))
    if arguments.json:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        report = {"machine": machine(), "commit": head.stdout.strip(), "results": results}
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
