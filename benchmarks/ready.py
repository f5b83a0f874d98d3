"""Trees in turns: from `meshlm serve` to ready, and how fast one stream decodes then.

    python -P benchmarks/ready.py --tree OLD=BIN/meshlm --tree NEW=BIN/meshlm [--rounds 5] [--tokens 0] [--json FILE] -- FLAGS

`seconds` is wall time to the line that says so, `cpu_seconds` what all processes have used by then, which other work on the machine
changes less. With --tokens one greedy stream follows: `itl_ms` is the time between two tokens that a quarter of them stay below, for
the same reason, and `worker_cpu_ms` the worker's CPU time for a token. Modules are compiled before, as pip does: a start of each tree
that is not counted fills a folder for bytecode, whatever PYTHONDONTWRITEBYTECODE says.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).parent))

from control_plane import free_port, machine, run_seconds

Figures = dict[str, float]


def descendants(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def worker_of(pids: list[int]) -> int:
    return next(pid for pid in pids if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"meshlm: worker"))


def stream(port: int, tokens: int) -> list[float]:
    """Seconds between the tokens of one stream."""
    body = {"prompt": [1000 + 13 * place for place in range(32)], "max_tokens": tokens, "temperature": 0.0}
    body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
    ask = Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urlopen(ask, timeout=300) as answer:
        times = [time.perf_counter() for line in answer if line.startswith(b"data: {")]
    return [after - before for before, after in pairwise(times)]


def environment(bytecode: str) -> dict[str, str]:
    """The environment of a tree whose modules are compiled once, into this folder."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": bytecode}


def measure(meshlm: str, flags: list[str], tokens: int, bytecode: str) -> Figures:
    port, run_dir = free_port(), tempfile.mkdtemp(prefix="mlm")
    command = [meshlm, "serve", "--port", str(port), "--run-dir", run_dir, "--disable-log-requests", *flags]
    begun = time.perf_counter()
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/", env=environment(bytecode))
    assert server.stderr is not None
    try:
        while "ready: http" not in server.stderr.readline():
            if server.poll() is not None:
                raise SystemExit(f"{command} ended")
        found = {"seconds": time.perf_counter() - begun}
        pids = descendants(server.pid)
        found["cpu_seconds"] = sum(map(run_seconds, pids))
        if tokens:
            worker = worker_of(pids)
            before = run_seconds(worker)
            waits = [wait for _ in range(3) for wait in stream(port, tokens)]
            found["itl_ms"] = statistics.quantiles(waits, n=4)[0] * 1e3
            found["worker_cpu_ms"] = (run_seconds(worker) - before) * 1e3 / (3 * tokens)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
        server.stderr.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tree", action="append", required=True, help="NAME=the meshlm command of a tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=0, help="of each of three streams; 0: none")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("flags", nargs="*", help="of meshlm serve, after --")
    arguments = parser.parse_args()
    trees = dict(tree.split("=", 1) for tree in arguments.tree)
    rounds: dict[str, list[Figures]] = {name: [] for name in trees}
    with contextlib.ExitStack() as folders:
        bytecode = {name: folders.enter_context(tempfile.TemporaryDirectory(prefix="mlm")) for name in trees}
        for number in range(arguments.rounds + 1):
            for name in sorted(trees, reverse=bool(number % 2)):
                found = measure(trees[name], arguments.flags, arguments.tokens if number else 0, bytecode[name])
                if number:
                    rounds[name].append(found)
                    print(name, {key: round(value, 3) for key, value in found.items()}, flush=True)
    medians = {
        name: {key: round(statistics.median(one[key] for one in found), 3) for key in found[0]}
        for name, found in rounds.items()
    }
    print(json.dumps(medians, indent=1))
    if arguments.json:
        report = {"machine": machine(), "flags": arguments.flags, "medians": medians, "rounds": rounds}
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
