"""Data parallelism on a real mesh: the routing policies on traffic with shared prefixes, and output tokens/s over DP sizes.

    python -P benchmarks/routing.py MODEL --dp 4 [--traffic shared-prefix multi-turn] [--routing ...] [--seconds 15] [--json FILE]
    python -P benchmarks/routing.py MODEL --scaling --dp 1 2 4 [--pairs-per-rank 1] [--seconds 15] [--json FILE]

Clients are closed loops in processes of their own; what they see in the first --warmup seconds does not count. After `--` come
flags for `meshlm serve`: `-- --load-format dummy --dtype bfloat16`, or `-- --device fake --fake-step-ms 5`.

Traffic. shared-prefix: users with a system prompt of 2,048 tokens each, every request asks 128 new tokens of a random user.
multi-turn: conversations of five turns, each of which sends all that was said and 128 new tokens, under a system prompt of a few users.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

MESHLM = [sys.executable, "-P", "-m", "meshlm.supervisor"]
START_LIMIT_S = 180
TICKS = os.sysconf("SC_CLK_TCK")


class Client:
    """One process's closed loops. Times are of time.perf_counter(), which all processes of a host share."""

    def __init__(self, options: argparse.Namespace, port: int, kind: str, number: int, num_ranks: int) -> None:
        self.options, self.port, self.kind = options, port, kind
        self.loops = options.concurrency * num_ranks // options.clients
        self.dice = random.Random(f"{options.seed} {kind} {number}")
        users = options.users * num_ranks
        self.systems = [self._tokens(random.Random(f"{options.seed} {kind} {user}"), 2048) for user in range(users)]
        self.begun, self.ends = 0.0, 0.0
        self.ttft: list[float] = []
        self.num_tokens = self.num_failed = self.num_requests = 0

    @staticmethod
    def _tokens(dice: random.Random, count: int) -> list[int]:
        return [dice.randrange(1000, 30_000) for _ in range(count)]

    async def run(self) -> None:
        self.begun = time.perf_counter() + self.options.warmup
        self.ends = self.begun + self.options.seconds
        await asyncio.gather(*(self._loop() for _ in range(self.loops)))

    async def _loop(self) -> None:
        while time.perf_counter() < self.ends:
            if self.kind == "decode":
                await self._ask(self._tokens(self.dice, self.options.input_len))
                continue
            said = list(self.dice.choice(self.systems))
            for _ in range(5 if self.kind == "multi-turn" else 1):
                said += self._tokens(self.dice, 128)
                said += await self._ask(said)
                if time.perf_counter() > self.ends:
                    return

    async def _ask(self, prompt: list[int]) -> list[int]:
        """The answer's token ids."""
        body = {"prompt": prompt, "max_tokens": self.options.output_len, "ignore_eos": True, "temperature": 0}
        body |= {"stream": True, "return_token_ids": True}
        text = json.dumps(body).encode()
        begun, answer = time.perf_counter(), list[int]()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 20)
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
            writer.write(head.encode() + text)
            if b" 200 " not in await reader.readline():
                raise OSError("refused")
            while line := await reader.readline():
                if not line.startswith(b"data: {"):
                    continue
                now = time.perf_counter()
                new = json.loads(line[6:])["choices"][0]["token_ids"]
                self.num_requests += not answer and bool(new)
                if new and not answer and begun > self.begun:
                    self.ttft.append(now - begun)
                answer += new
                if self.begun < now < self.ends:
                    self.num_tokens += len(new)
                elif now > self.ends:
                    break
            writer.close()
        except OSError:
            self.num_failed += 1
            await asyncio.sleep(0.1)
        return answer


def _client(arguments: tuple[argparse.Namespace, int, str, int, int]) -> tuple[list[float], int, int, int]:
    client = Client(*arguments)
    asyncio.run(client.run())
    return client.ttft, client.num_tokens, client.num_failed, client.num_requests


class Server:
    """A mesh that is ready, for a `with`."""

    def __init__(self, options: argparse.Namespace, *flags: str) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = int(sock.getsockname()[1])
        self.run_dir = tempfile.mkdtemp(prefix="mlm")
        self._log = Path(self.run_dir).with_suffix(".log").open("w+")
        command = [*MESHLM, "serve", *([options.model] if options.model else []), "--disable-log-requests"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--run-dir", self.run_dir]
        command += ["--max-model-len", "8192", *flags, *options.serve_flags]
        self._begun = time.perf_counter()
        self._process = subprocess.Popen(command, stderr=self._log, cwd="/", env={**os.environ, "PYTHONSAFEPATH": "1"})

    def __enter__(self) -> "Server":
        while time.perf_counter() < self._begun + START_LIMIT_S:
            if self._process.poll() is not None:
                raise SystemExit(f"the mesh ended:\n{self._said()}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=1):
                    self.ready_s = time.perf_counter() - self._begun
                    time.sleep(1.5)  # all ranks, not only the first
                    return self
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"not ready after {START_LIMIT_S} s:\n{self._said()}")

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()

    def cache(self) -> tuple[float, float]:
        """Prompt tokens looked up and found, of all ranks. The figures come once a second."""
        time.sleep(1.5)
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = []
        for name in ("queries", "hits"):
            rows = re.findall(rf"^meshlm:prefix_cache_{name}_total{{.*}} (.*)$", text, re.MULTILINE)
            found.append(sum(map(float, rows)))
        return found[0], found[1]

    def cpu(self) -> dict[str, float]:
        """CPU seconds so far, by process."""
        ask = [*MESHLM, "status", "--json", "--run-dir", self.run_dir]
        processes = json.loads(subprocess.run(ask, capture_output=True, text=True, check=True, cwd="/").stdout)[
            "processes"
        ]
        used = {}
        for process in processes:
            fields = Path(f"/proc/{process['pid']}/stat").read_text().rpartition(")")[2].split()
            used[f"{process['role']}/{process['index']}"] = (int(fields[11]) + int(fields[12])) / TICKS
        return used


def load(options: argparse.Namespace, server: Server, kind: str, num_ranks: int) -> dict[str, Any]:
    """Clients on a mesh that is ready; what they and it say."""
    queries, hits = server.cache()
    before, begun = server.cpu(), time.perf_counter()
    tasks = [(options, server.port, kind, number, num_ranks) for number in range(options.clients)]
    with multiprocessing.get_context("spawn").Pool(options.clients) as pool:
        parts = pool.map(_client, tasks, chunksize=1)
    elapsed, after = time.perf_counter() - begun, server.cpu()
    new_queries, new_hits = server.cache()
    num_requests = sum(part[3] for part in parts)
    ttft = sorted(value for part in parts for value in part[0])
    cores: dict[str, float] = {}  # of each role, the busiest process
    for name, seconds in after.items():
        role, used = name.partition("/")[0], round((seconds - before.get(name, 0.0)) / elapsed, 2)
        cores[role] = max(cores.get(role, 0.0), used)
    return {
        "output_tokens_per_s": round(sum(part[1] for part in parts) / options.seconds),
        "requests": len(ttft),
        "failed": sum(part[2] for part in parts),
        "ttft_ms": {f"p{p}": round(1e3 * ttft[int(len(ttft) * p / 100)], 1) for p in (50, 90, 99)} if ttft else {},
        "hit_rate": round((new_hits - hits) / max(1.0, new_queries - queries), 4),
        "busiest_process_cores": cores,
        "coordinator_us_per_request": round(
            1e6 * (after["coordinator/0"] - before["coordinator/0"]) / max(1, num_requests)
        ),
    }


def policies(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for routing in options.routing:
        pairs = str(options.pairs_per_rank * options.dp[0])
        flags = ("-dp", str(options.dp[0]), "--dp-routing", routing, "--frontends", pairs, "--detokenizers", pairs)
        with Server(options, *flags) as server:
            for kind in options.traffic:
                row = {"dp": options.dp[0], "routing": routing, "traffic": kind, "ready_s": round(server.ready_s, 1)}
                rows.append(row | load(options, server, kind, options.dp[0]))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def scaling(options: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for num_ranks in options.dp:
        pairs = options.pairs_per_rank * num_ranks
        flags = ("-dp", str(num_ranks), "--frontends", str(pairs), "--detokenizers", str(pairs))
        with Server(options, *flags, "--no-enable-prefix-caching") as server:
            row: dict[str, Any] = {"dp": num_ranks, "pairs": pairs, "ready_s": round(server.ready_s, 1)}
            row |= load(options, server, "decode", num_ranks)
        per_rank = row["output_tokens_per_s"] / num_ranks
        first = rows[0]["output_tokens_per_s"] / rows[0]["dp"] if rows else per_rank
        rows.append(row | {"efficiency": round(per_rank / max(1.0, first), 3)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def machine() -> dict[str, object]:
    cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    except (OSError, subprocess.CalledProcessError):
        gpus = []
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    commit = os.environ.get("COMMIT") or head.stdout.strip()
    return {"cpu": cpu[0], "cores": len(os.sched_getaffinity(0)), "gpus": gpus, "commit": commit}


def main() -> None:
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--dp", type=int, nargs="+", default=[4])
    parser.add_argument("--scaling", action="store_true", help="output tokens/s for each of --dp, not the policies")
    parser.add_argument("--traffic", nargs="+", default=["shared-prefix", "multi-turn"])
    parser.add_argument("--routing", nargs="+", default=["cache-aware", "least-loaded", "round-robin"])
    parser.add_argument("--concurrency", type=int, default=64, help="requests at a time, for each rank")
    parser.add_argument("--users", type=int, default=32, help="system prompts, for each rank")
    parser.add_argument("--input-len", type=int, default=128, help="with --scaling")
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--clients", type=int, default=8, help="client processes")
    parser.add_argument("--pairs-per-rank", type=int, default=1, help="frontends and detokenizers for each rank")
    parser.add_argument("--warmup", type=float, default=6.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file for the results")
    options = parser.parse_args(argv[:cut])
    options.serve_flags = argv[cut + 1 :]
    if Path(options.model).exists() and options.model:
        options.model = str(Path(options.model).resolve())  # the mesh runs in another folder
    rows = scaling(options) if options.scaling else policies(options)
    if options.json:
        shown = {name: value for name, value in vars(options).items() if name != "json"}
        Path(options.json).write_text(
            json.dumps({"machine": machine(), "options": shown, "results": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
