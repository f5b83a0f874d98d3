"""Every workload of docs/performance.md for one model, in one run: serve at 1, 64 and 256 streams, offline, latency.

    python -P benchmarks/targets.py MODEL [--sharegpt FILE] [--json FILE] [--only serve offline lat long]
                                    [--flags="--flag VALUE ..."]

The command lines are vLLM's, so that `vllm serve` and `vllm bench` repeat them word for word. Dummy weights, bfloat16. `long`, which
runs when it is asked for, is 20 prompts of 32,000 tokens at 4 streams, with the prefix cache on, as users have it.
"""

import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import harness
from harness import MESHLM

PORT = 8111
COMMON = ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "4096"]
SERVE = [*COMMON, "--no-enable-prefix-caching", "--disable-log-requests", "--max-num-batched-tokens", "8192"]
LONG = ["--load-format", "dummy", "--dtype", "bfloat16", "--max-model-len", "32768", "--disable-log-requests"]
LONG += ["--max-num-batched-tokens", "8192"]
STREAMS = {1: (10, 2), 64: (320, 16), 256: (1024, 32)}  # concurrency: prompts, warm-ups
KEPT = [f"{percentile}_{name}_ms" for name in ("ttft", "tpot", "itl") for percentile in ("p50", "p99")]
KEPT += ["output_throughput", "completed", "failed"]


class Work(NamedTuple):
    """One run of the client."""

    streams: int
    prompts: int
    warmups: int
    input_len: int = 1024


def wait_ready(server: subprocess.Popen[str], begun: float) -> float:
    """Seconds from the command to ready."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=1):
                return time.perf_counter() - begun
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"the server ended:\n{server.stderr.read() if server.stderr else ''}")


def device_seconds() -> tuple[float, float]:
    """Busy, and idle although requests were running, since the start."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics") as answer:
        text = answer.read().decode()
    busy, idle = (
        re.search(rf"^meshlm:device_{name}_seconds_total{{.*}} (\S+)$", text, re.MULTILINE) for name in ("busy", "idle")
    )
    return (float(busy.group(1)), float(idle.group(1))) if busy and idle else (0.0, 0.0)


def serve(model: str, folder: Path, flags: list[str]) -> dict[str, Any]:
    works = {f"c{streams}": Work(streams, *counts) for streams, counts in STREAMS.items()}
    return served(model, folder, [*SERVE, *flags], works)


def long(model: str, folder: Path, flags: list[str]) -> dict[str, Any]:
    return served(model, folder, [*LONG, *flags], {"c4": Work(4, 20, 1, 32_000)})


def served(model: str, folder: Path, flags: list[str], works: dict[str, Work]) -> dict[str, Any]:
    """One server, and one workload after the other against it."""
    begun = time.perf_counter()
    log = (folder / "serve.log").open("w")
    server = subprocess.Popen([*MESHLM, "serve", model, *flags, "--port", str(PORT)], stderr=log, text=True)
    found: dict[str, Any] = {}
    try:
        found["ready_s"] = round(wait_ready(server, begun), 1)
        time.sleep(5)
        for name, work in works.items():
            found[name] = client(folder / f"{name}.json", work)
    finally:
        server.terminate()
        server.wait()
    text = (folder / "serve.log").read_text()
    tokens = re.search(r"KV cache (\d+) tokens", text)
    found["kv_cache_tokens"] = int(tokens.group(1)) if tokens else None
    return found


def client_command(program: list[str], port: int, out: Path, work: Work) -> list[str]:
    """`bench serve` of either program, which leaves its figures in `out`."""
    return [
        *(*program, "bench", "serve", "--backend", "openai", "--base-url", f"http://127.0.0.1:{port}"),
        *("--endpoint", "/v1/completions", "--dataset-name", "random", "--random-input-len", str(work.input_len)),
        *("--random-output-len", "128", "--request-rate", "inf", "--num-prompts", str(work.prompts)),
        *("--num-warmups", str(work.warmups), "--max-concurrency", str(work.streams), "--ignore-eos"),
        *("--temperature", "0", "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,90,99"),
        *("--save-result", "--result-dir", str(out.parent), "--result-filename", out.name),
    ]


def client(out: Path, work: Work) -> dict[str, Any]:
    command = client_command(MESHLM, PORT, out, work)
    busy, idle = device_seconds()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    time.sleep(1.2)  # the mesh's figures come once a second
    busy, idle = (after - before for after, before in zip(device_seconds(), (busy, idle), strict=True))
    result = json.loads(out.read_text())
    found = {name: round(result[name], 2) for name in KEPT if name in result}
    return {**found, "device_busy_s": round(busy, 2), "device_idle_share": round(idle / (busy + idle or 1), 4)}


def bench(out: Path, what: str, model: str, *words: str) -> dict[str, Any]:
    """What `meshlm bench` leaves in `out`."""
    command = [*MESHLM, "bench", what, "--model", model, *COMMON, *words, "--output-json", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return dict(json.loads(out.read_text()))


def offline(model: str, sharegpt: str, folder: Path) -> dict[str, Any]:
    words = ["--dataset-name", "sharegpt", "--dataset-path", sharegpt, "--num-prompts", "1000", "--num-warmups", "32"]
    words += ["--seed", "0", "--max-num-batched-tokens", "16384", "--max-num-seqs", "1024"]
    return bench(folder / "offline.json", "throughput", model, *words)


def latency(model: str, batch: int, folder: Path) -> float:
    words = ["--input-len", "512", "--output-len", "128", "--batch-size", str(batch)]
    words += ["--num-iters-warmup", "2", "--num-iters", "5"]
    return round(float(bench(folder / f"lat-{batch}.json", "latency", model, *words)["avg_latency"]) * 1e3, 1)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--sharegpt", help="sharegpt_1000.json")
    parser.add_argument("--only", nargs="+", default=["serve", "offline", "lat"])
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of the servers")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"model": Path(arguments.model).name, "flags": [*SERVE, *arguments.flags]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "serve" in arguments.only:
            report["serve"] = serve(arguments.model, folder, arguments.flags)
            print(json.dumps(report["serve"]), flush=True)
        if "long" in arguments.only:
            report["long"] = {"flags": LONG, **long(arguments.model, folder, arguments.flags)}
            print(json.dumps(report["long"]), flush=True)
        if "offline" in arguments.only and arguments.sharegpt:
            report["offline"] = offline(arguments.model, arguments.sharegpt, folder)
            print(json.dumps(report["offline"]), flush=True)
        if "lat" in arguments.only:
            report["lat_ms"] = {f"batch_{batch}": latency(arguments.model, batch, folder) for batch in (1, 64)}
            print(json.dumps(report["lat_ms"]), flush=True)
    harness.keep(arguments.json, report)


if __name__ == "__main__":
    main()
