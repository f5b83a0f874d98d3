"""Overload: a mesh with the fake device, offered 1, 2 and 10 times what it can take. What runs must keep its pace.

    python -P benchmarks/overload.py [--seconds 10] [--step-ms 10] [--max-num-seqs 32] [--max-waiting 64] [--json FILE]

The sustainable load is measured first (as many streams as have a place, one after the other). Then requests arrive at random
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
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

MESHLM = Path(sys.executable).parent / "meshlm"
TICKS = os.sysconf("SC_CLK_TCK")
LEVELS = (1, 2, 10)
SHARES = (("p50_below", 0.5), ("p99_below", 0.99))
LIMIT_S = 60.0  # after the last arrival, until the last answer


class Request(asyncio.Protocol):
    """One streaming request: when its status, its first and its other tokens came."""

    def __init__(self, body: bytes) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.retry_after = self.complete = False
        self.begun = self.answered = 0.0
        self.times: list[float] = []  # of chunks
        self._body = body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.begun = time.perf_counter()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        transport.write(head % len(self._body) + self._body)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.status:
            self.status, self.answered = int(data[9:12]), now
            self.retry_after = b"retry-after:" in data.lower()
        self.times += [now] * data.count(b"data: {")
        self.complete = self.complete or b"[DONE]" in data

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Load:
    """Sends requests of one shape to one port."""

    def __init__(self, port: int, num_tokens: int, seed: int) -> None:
        self._port, self._num_tokens = port, num_tokens
        self.dice = random.Random(seed)

    async def one(self) -> Request:
        prompt = [self.dice.randrange(300, 40_000) for _ in range(32)]
        body = {"prompt": prompt, "max_tokens": self._num_tokens, "ignore_eos": True, "stream": True}
        request = Request(json.dumps(body).encode())
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: request, "127.0.0.1", self._port)
        return request

    async def sustainable(self, streams: int, rounds: int = 4) -> float:
        """Requests a second when as many run as have a place."""

        async def stream() -> None:
            for _ in range(rounds):
                await (await self.one()).done

        begun = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        return streams * rounds / (time.perf_counter() - begun)

    async def offered(self, rate: float, seconds: float) -> list[Request]:
        """Arrivals that wait for nobody."""
        tasks: list[asyncio.Task[Request]] = []
        begun = due = time.perf_counter()
        while due < begun + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.ensure_future(self.one()))
            due += self.dice.expovariate(rate)
        requests = list(await asyncio.gather(*tasks))
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(request.done for request in requests))
        return requests


def quantiles(values: list[float]) -> dict[str, float] | None:
    """Milliseconds."""
    if len(values) < 2:
        return None
    cuts = statistics.quantiles(values, n=1000, method="inclusive")
    return {"p50": round(1e3 * cuts[499], 2), "p99": round(1e3 * cuts[989], 2), "max": round(1e3 * max(values), 2)}


def report(level: float, rate: float, requests: list[Request]) -> dict[str, Any]:
    served = [request for request in requests if request.status == 200]
    refused = [request for request in requests if request.status == 503]
    gaps = [b - a for request in served for a, b in pairwise(request.times)]
    return {
        "load": level,
        "offered_per_s": round(rate, 1),
        "requests": len(requests),
        "served": len(served),
        "broken": sum(not request.complete for request in served),
        "refused_share": round(len(refused) / len(requests), 4),
        "refused_without_retry_after": sum(not request.retry_after for request in refused),
        "other": len(requests) - len(served) - len(refused),
        "itl_ms": quantiles(gaps),
        "ttft_ms": quantiles([request.times[0] - request.begun for request in served if request.times]),
        "refusal_ms": quantiles([request.answered - request.begun for request in refused]),
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


def processes(run_dir: str) -> dict[str, tuple[float, float]]:
    """Resident MiB and CPU seconds by process."""
    asked = subprocess.run([MESHLM, "status", "--json", "--run-dir", run_dir], capture_output=True, check=True, cwd="/")
    rows = json.loads(asked.stdout)["processes"]
    return {f"{row['role']}/{row['index']}": (row["rss_bytes"] / 2**20, cpu_seconds(row["pid"])) for row in rows}


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


async def measure(arguments: argparse.Namespace, port: int, run_dir: str) -> dict[str, Any]:
    load = Load(port, arguments.tokens, arguments.seed)
    await load.sustainable(arguments.max_num_seqs, 1)  # everything has been touched once
    rate = await load.sustainable(arguments.max_num_seqs)
    found = []
    first = before = processes(run_dir)
    for level in LEVELS:
        refused = refusals(port)
        begun, used = time.perf_counter(), time.process_time()
        result = report(level, level * rate, await load.offered(level * rate, arguments.seconds))
        wall, after = time.perf_counter() - begun, processes(run_dir)
        result["refusal_by_frontend_ms"] = bounds(refused, refusals(port))
        result["rss_mib"] = {name: round(mib, 1) for name, (mib, _) in after.items()}
        cores = {name: round((seconds - before[name][1]) / wall, 2) for name, (_, seconds) in after.items()}
        result["cores_used"] = {**cores, "client": round((time.process_time() - used) / wall, 2)}
        result["seconds_until_idle"] = round(wall, 1)
        before = after
        print(json.dumps(result), file=sys.stderr, flush=True)
        found.append(result)
    rss = {name: round(mib, 1) for name, (mib, _) in first.items()}
    return {"sustainable_per_s": round(rate, 1), "rss_mib_before": rss, "levels": found}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def main() -> None:
    if sys.argv[1:2] == ["--attacks"]:
        sys.path.insert(0, str(Path(__file__).parent))
        from attacked import main as attacked

        attacked(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals at each level")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--tokens", type=int, default=50, help="output tokens of a request")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-waiting", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    port, load_before = free_port(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mlm") as run_dir:
        flags = ["--device", "fake", "--fake-step-ms", str(arguments.step_ms), "--max-model-len", "4096"]
        flags += ["--max-num-seqs", str(arguments.max_num_seqs), "--max-waiting", str(arguments.max_waiting)]
        flags += ["--host", "127.0.0.1", "--port", str(port), "--run-dir", run_dir, "--disable-log-requests"]
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        mesh = subprocess.Popen([MESHLM, "serve", *flags], cwd="/", env=environment, stderr=subprocess.PIPE, text=True)
        assert mesh.stderr is not None
        try:
            for line in mesh.stderr:
                if "ready: http" in line:
                    break
            result = asyncio.run(measure(arguments, port, run_dir))
        finally:
            mesh.send_signal(signal.SIGTERM)
            mesh.wait(timeout=60)
    machine = {
        "cpus": os.cpu_count(),
        "load_average_before": round(load_before, 1),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    given = {name: value for name, value in vars(arguments).items() if name != "json"}
    record = {"benchmark": "overload", "machine": machine, "arguments": given, **result}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
