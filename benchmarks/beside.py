"""MeshLM and vLLM beside one another, each on a GPU of one host: the workloads of docs/performance.md for one model after another.

    python -P benchmarks/beside.py MODEL ... [--vllm FOLDER] [--sharegpt FILE] [--json FILE] [--only offline serve long longest]
                                   [--gpus 0 1] [--engines meshlm vllm] [--streams 64 256] [--limit-s 400] [--port 8131]
                                   [--device fake]

MODEL is a folder, or folder@flags of both servers, or folder@flags@kinds of its own: "llama3-8b@--quantization fp8@offline".
FOLDER has vLLM's packages (PYTHONPATH); without it MeshLM runs alone. `long` is 20 prompts of 32,000 tokens at 4 streams, `longest`
three of 128,000. Each engine has a GPU and half of the cores, and goes through the models by itself; with one GPU they take turns, with
all cores. The client of servers is vLLM's own where it is there. A job that takes longer than its limit is ended with all processes
that it started, and said to be so. Figures are written to the JSON after each job, and what stands there is not measured again: a run
that was broken off goes on.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
import harness
import targets
from harness import MESHLM

HERE = Path(__file__).parent
OFFLINE_REQUESTS, SHORT = 1000, 4096
KINDS = ("offline", "serve", "long", "longest")
LONG = {"long": (32768, targets.Work(4, 20, 1, 32_000)), "longest": (131072, targets.Work(1, 3, 1, 128_000))}
READY_S = 300.0
VLLM = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main"]
VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # would compile when it is first asked
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


class Model(NamedTuple):
    """One model and the flags that both engines get."""

    folder: str
    flags: tuple[str, ...]
    kinds: tuple[str, ...] = ()  # of work; none: those of --only

    @property
    def name(self) -> str:
        return " ".join((Path(self.folder).name, *self.flags))

    @classmethod
    def of(cls, text: str) -> "Model":
        """ValueError for kinds that there are not."""
        folder, flags, kinds = (text.split("@") + ["", ""])[:3]
        if unknown := set(kinds.split()) - set(KINDS):
            raise ValueError(f"{text}: no kinds of work are {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
        return cls(folder, tuple(shlex.split(flags)), tuple(kinds.split()))

    @property
    def settings(self) -> dict[str, Any]:
        """The flags as the Python API has them: values, or true where none follows."""
        found: dict[str, Any] = {}
        for word in self.flags:
            if word.startswith("--"):
                name = word.removeprefix("--").replace("-", "_")
                found[name] = True
            else:
                found[name] = int(word) if word.isdecimal() else word
        return found


class Engine(NamedTuple):
    """One of the two, on its GPU and its cores."""

    name: str
    gpu: str
    cores: tuple[int, ...]
    port: int
    site: str = ""  # its packages
    device: str = ""  # of MeshLM: not the default

    @property
    def environment(self) -> dict[str, str]:
        found = dict(os.environ)
        if self.gpu:
            found["CUDA_VISIBLE_DEVICES"] = self.gpu
        if self.site:
            found |= {"PYTHONPATH": self.site, **VLLM_ENVIRONMENT}
        return found

    def server(self, model: Model, length: int) -> list[str]:
        own = [
            "--load-format",
            "dummy",
            "--dtype",
            "bfloat16",
            "--max-model-len",
            str(length),
            "--port",
            str(self.port),
        ]
        if length != LONG["long"][0]:  # a client's warm-up repeats its first prompt
            own.append("--no-enable-prefix-caching")
        if self.name == "vllm":
            begin = [*VLLM, "serve"]
            own += ["--host", "127.0.0.1", "--disable-uvicorn-access-log"]
        else:
            begin = [*MESHLM, "serve"]
            own += ["--disable-log-requests", "--max-num-batched-tokens", "8192"]
            own += ["--orphan-grace", "0"]  # `end_all` kills the leader alone
            own += ["--device", self.device] if self.device else []
        return [*begin, model.folder, *own, *model.flags]


def end(process: "subprocess.Popen[bytes]") -> None:
    """All that it started and that did not begin a session of its own; of MeshLM those end with their supervisor."""
    for number, seconds in ((signal.SIGTERM, 25.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


_leaders: set["subprocess.Popen[bytes]"] = set()  # of the processes that run


def end_all(number: int, frame: object) -> None:
    """When this is ended nothing stays on the GPUs."""
    for process in tuple(_leaders):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    os._exit(128 + number)


@contextlib.contextmanager
def running(command: list[str], engine: Engine, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that leads a group of its own, on the engine's GPU and cores."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=engine.environment, start_new_session=True
        )
    if engine.cores:
        os.sched_setaffinity(process.pid, engine.cores)
    _leaders.add(process)
    try:
        yield process
    finally:
        end(process)
        _leaders.discard(process)


def finished(command: list[str], engine: Engine, log: Path, limit_s: float) -> None:
    """Run it to its end. TimeoutError, RuntimeError with what it said last."""
    with running(command, engine, log) as process:
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"took longer than {limit_s:g} s") from None
    if code:
        raise RuntimeError(f"exit code {code}: {last_words(log)}")


def last_words(log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-600:]


def wait_ready(process: "subprocess.Popen[bytes]", engine: Engine, log: Path) -> float:
    """Seconds until it answers. RuntimeError, TimeoutError."""
    begun = time.monotonic()
    path = "health" if engine.name == "vllm" else "ready"
    while time.monotonic() - begun < READY_S:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {last_words(log)}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{engine.port}/{path}", timeout=1):
                return time.monotonic() - begun
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(f"no server in {READY_S:g} s: {last_words(log)}")


class Run:
    """The jobs of all engines, and what they found so far."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._lock = threading.Lock()
        self._json = Path(arguments.json) if arguments.json else None
        self.report: dict[str, Any] = {"models": {}}
        if self._json is not None and self._json.exists():
            self.report = {"models": json.loads(self._json.read_text())["models"]}

    def go_through(self, engine: Engine) -> None:
        for text in self._arguments.models:
            model = Model.of(text)
            for kind in model.kinds or self._arguments.only:
                known = self.report["models"].get(model.name, {}).get(engine.name, {})
                if kind in known and "error" not in known[kind]:
                    continue
                self._note(model, engine, kind, self._measured(model, engine, kind))

    def _measured(self, model: Model, engine: Engine, kind: str) -> dict[str, Any]:
        log = self._folder / f"{engine.name}-{kind}-{len(list(self._folder.iterdir()))}.log"
        found: dict[str, Any] = {}
        try:
            if kind == "offline":
                self._offline(model, engine, log, found)
            else:
                self._serve(model, engine, kind, log, found)
        except (TimeoutError, RuntimeError, OSError) as error:
            found["error"] = str(error)
        return found

    def _note(self, model: Model, engine: Engine, kind: str, found: dict[str, Any]) -> None:
        with self._lock:
            self.report["models"].setdefault(model.name, {}).setdefault(engine.name, {})[kind] = found
            print(json.dumps({"model": model.name, "engine": engine.name, kind: found}), flush=True)
            harness.keep(self._json, self.report)

    def _offline(self, model: Model, engine: Engine, log: Path, found: dict[str, Any]) -> None:
        out = log.with_suffix(".json")
        settings = model.settings | ({"device": engine.device} if engine.device else {})
        command = [sys.executable, "-P", str(HERE / "beside_offline.py"), engine.name, model.folder]
        command += ["--requests", str(self._requests(model)), "--out", str(out), "--settings", json.dumps(settings)]
        command += ["--batches", *map(str, self._arguments.batches)]
        try:
            finished(command, engine, log, self._arguments.limit_s)
        finally:
            if out.exists():
                found.update(json.loads(out.read_text()))

    def _requests(self, model: Model) -> Path:
        """ShareGPT's questions and the lengths of their answers, in the model's tokens."""
        from tokenizers import Tokenizer

        from meshlm.supervisor.bench import data

        path = self._folder / f"requests-{Path(model.folder).name}.json"
        with self._lock:
            if path.exists():
                return path
            found: list[tuple[list[int], int]] = []
            if self._arguments.sharegpt:
                tokenizer = Tokenizer.from_file(str(Path(model.folder) / "tokenizer.json"))

                def encode(texts: list[str]) -> list[list[int]]:
                    return [one.ids for one in tokenizer.encode_batch_fast(texts)]

                reading = data.Reading(self._arguments.sharegpt, self._arguments.requests, 0)
                found = [(encode([str(one.prompt)])[0], one.output_len) for one in data.sharegpt(reading, encode, None)]
            path.write_text(json.dumps(found))
            return path

    def _serve(self, model: Model, engine: Engine, kind: str, log: Path, found: dict[str, Any]) -> None:
        length, works = SHORT, {f"c{count}": streams(count) for count in self._arguments.streams}
        if kind in LONG:
            length, work = LONG[kind]
            works = {f"c{work.streams}": work}
        with running(engine.server(model, length), engine, log) as server:
            found["ready_s"] = round(wait_ready(server, engine, log), 1)
            for name, work in works.items():
                out = log.with_suffix(f".{name}.json")
                finished(self._client(model, engine, work, out), self._of_client(engine), log, self._arguments.limit_s)
                result = json.loads(out.read_text())
                if not result["completed"]:
                    raise RuntimeError(f"{name}: no request was answered; {last_words(log)}")
                found[name] = {key: round(result[key], 2) for key in targets.KEPT if key in result}

    def _of_client(self, engine: Engine) -> Engine:
        """The client has the cores of the engine, and no GPU."""
        return engine._replace(gpu="", site=self._arguments.vllm or "")

    def _client(self, model: Model, engine: Engine, work: targets.Work, out: Path) -> list[str]:
        program = VLLM if self._arguments.vllm else MESHLM
        return [*targets.client_command(program, engine.port, out, work), "--model", model.folder]


def streams(count: int) -> targets.Work:
    """The client's run with so many streams."""
    prompts, warm_ups = targets.STREAMS.get(count, (4 * count, count // 4))
    return targets.Work(count, prompts, warm_ups)


def in_turn(arguments: argparse.Namespace) -> bool:
    """Whether one engine goes through all models, then the other: there is one GPU for both."""
    return len(arguments.gpus) == 1


def engines(arguments: argparse.Namespace) -> list[Engine]:
    """MeshLM, and vLLM where its packages are; they share the cores, where they do not take turns."""
    cores, gpus = sorted(os.sched_getaffinity(0)), [*arguments.gpus, "", ""]
    both = arguments.vllm and len(arguments.engines) > 1 and len(cores) > 1 and not in_turn(arguments)
    half = len(cores) // 2 if both else len(cores)
    found = [Engine("meshlm", gpus[0], tuple(cores[:half]), arguments.port, device=arguments.device)]
    if arguments.vllm:
        found.append(
            Engine("vllm", gpus[1] or gpus[0], tuple(cores[half:]) or tuple(cores), arguments.port + 1, arguments.vllm)
        )
    return [engine for engine in found if engine.name in arguments.engines]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--vllm", default="", help="folder with vLLM's packages")
    parser.add_argument("--sharegpt", default="", help="sharegpt_1000.json")
    parser.add_argument("--requests", type=int, default=OFFLINE_REQUESTS)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--only", nargs="+", choices=KINDS, default=["offline", "serve"])
    parser.add_argument("--gpus", nargs="*", default=[])
    parser.add_argument(
        "--limit-s", type=float, default=400.0, help="of one engine's offline run, and of each client's"
    )
    parser.add_argument("--engines", nargs="+", choices=("meshlm", "vllm"), default=["meshlm", "vllm"])
    parser.add_argument("--port", type=int, default=8131, help="of MeshLM's server; vLLM's has the next")
    parser.add_argument("--device", default="", help="of MeshLM")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_all)
    with tempfile.TemporaryDirectory(prefix="beside-") as name:
        run = Run(arguments, Path(name))
        threads = [threading.Thread(target=run.go_through, args=(engine,)) for engine in engines(arguments)]
        for thread in threads:
            thread.start()
            if in_turn(arguments):
                thread.join()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
