"""`meshlm bench sweep serve`: starts each server, runs each benchmark on it, and keeps every result in a file of its own.

A result is there when its run has ended well, so what was broken off goes on with --resume. The command line, the files of parameters
and the names of results are those of `vllm bench sweep serve`.
"""

import argparse
import contextlib
import csv
import hashlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from meshlm.supervisor.errors import StartError, UsageError, raised_as

NAME = "_benchmark_name"
LONGEST = 120  # of a folder's name
Params = dict[str, object]


class Combination(NamedTuple):
    """Parameters of the benchmark, beside those of the server."""

    serve: Params
    bench: Params

    def folder(self) -> str:
        """The name of its folder: the parameters, as far as a file system takes them."""
        text = f"{shown(self.serve) or 'serve'}--{shown(self.bench) or 'bench'}"
        safe = re.sub(r"[^\w.=+-]+", "_", text)
        if safe == text and len(text) <= LONGEST:
            return text
        return f"{safe[:LONGEST]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def shown(params: Params) -> str:
    """The name that was given to these parameters, or all of them."""
    if NAME in params:
        return str(params[NAME])
    return "-".join(f"{name}={_text(value)}" for name, value in params.items())


def read_params(flag: str, path: str | None) -> list[Params]:
    """The combinations in a JSON file: a list of objects, or an object of them by name. Without a file there is one, of nothing."""
    if path is None:
        return [{}]
    with raised_as(UsageError, OSError, ValueError, of=f"{flag} {path}"):
        read = json.loads(Path(path).read_text("utf-8"))
    found = [{NAME: name, **params} for name, params in _named(flag, path, read)] if isinstance(read, dict) else read
    if not isinstance(found, list) or not found or not all(isinstance(params, dict) for params in found):
        raise UsageError(f"{flag} {path}: a list of objects, or an object of objects, is expected")
    names = [str(params[NAME]) for params in found if NAME in params]
    if len(names) != len(set(names)):
        raise UsageError(f"{flag} {path}: a {NAME} is there twice")
    return found


def _named(flag: str, path: str, read: dict[str, object]) -> list[tuple[str, Params]]:
    wrong = [name for name, params in read.items() if not isinstance(params, dict)]
    if wrong:
        raise UsageError(f"{flag} {path}: {wrong[0]} is no object")
    return [(name, params) for name, params in read.items() if isinstance(params, dict)]


def read_links(text: str) -> list[tuple[str, str]]:
    """--link-vars: pairs of a server's and a benchmark's parameter that must be equal."""
    links = []
    for pair in filter(None, (part.strip() for part in text.split(","))):
        serve, equals, bench = pair.partition("=")
        if not (serve and equals and bench):
            raise UsageError(f"--link-vars {pair}: SERVE_PARAMETER=BENCH_PARAMETER is expected")
        links.append((serve, bench))
    return links


def combinations(
    serve: Sequence[Params], bench: Sequence[Params], links: Iterable[tuple[str, str]]
) -> list[tuple[Params, list[Combination]]]:
    """Each server's parameters with the combinations that are measured on it; servers with none are left out."""
    pairs = list(links)

    def fits(of_server: Params, each: Params) -> bool:
        return all(one in of_server and other in each and of_server[one] == each[other] for one, other in pairs)

    found = [(one, [Combination(one, each) for each in bench if fits(one, each)]) for one in serve]
    return [(one, mine) for one, mine in found if mine]


def with_params(command: Sequence[str], params: Params) -> list[str]:
    """The command with these flags: in the place of its own, or behind it. true and false are --flag and --no-flag."""
    words = list(command)
    for name, value in params.items():
        if name == NAME:
            continue
        flag = "--" + name.replace("_", "-")
        words = _without(words, flag)
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif value is not None:
            words += [flag, _text(value)]
    return words


def _without(words: list[str], flag: str) -> list[str]:
    """The words without a flag, its values and its negation."""
    names = {flag, flag.replace("-", "_").replace("__", "--", 1), f"--no-{flag[2:]}"}
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("-") and not _is_number(word):
            dropping = word.partition("=")[0] in names
        if not dropping:
            kept.append(word)
    return kept


def _is_number(word: str) -> bool:
    return re.fullmatch(r"-\d+(\.\d+)?", word) is not None


def _text(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def address(command: Sequence[str]) -> tuple[str, int]:
    """The host and port of a server's command line; by default 127.0.0.1 and 8000."""
    found = {"--host": "127.0.0.1", "--port": "8000"}
    words = [part for word in command for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for flag, value in itertools.pairwise(words):
        if flag in found:
            found[flag] = value
    if not found["--port"].isdecimal():
        raise UsageError(f"--serve-cmd: --port {found['--port']} is no port")
    host = found["--host"]
    return ("127.0.0.1" if host in ("0.0.0.0", "::", "") else host), int(found["--port"])


def rows(results: Iterable[tuple[Combination, int, Params]]) -> list[Params]:
    """The lines of the summary: parameters, number of the run, and what was measured, without lists."""
    found = []
    for combination, number, result in results:
        flat = {name: value for name, value in result.items() if not isinstance(value, dict | list)}
        params = {**combination.serve, **combination.bench}
        found.append({**flat, **params, NAME: combination.folder(), "run_number": number})
    return found


AGAIN_S = 0.2  # between two questions whether the server is ready
STOP_S = 60.0  # for which a server may drain
ASK_S = 5.0
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}  # it may be asked to clear its prefix cache; vLLM's and ours read it


def add_parser(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = kinds.add_parser("sweep", help="combinations of parameters of a server and a benchmark")
    sweeps = parser.add_subparsers(title="sweeps", metavar="KIND", required=True)
    parser = sweeps.add_parser("serve", help="start servers, and measure each")
    parser.add_argument("--serve-cmd", required=True, help="the server's command: `meshlm serve ...`")
    parser.add_argument("--bench-cmd", required=True, help="the benchmark's command: `meshlm bench serve ...`")
    parser.add_argument("--after-bench-cmd", help="run behind each benchmark, in the place of POST /reset_prefix_cache")
    parser.add_argument("--show-stdout", action="store_true", help="show what the commands print")
    parser.add_argument("--server-ready-timeout", type=float, default=300, metavar="SECONDS")
    parser.add_argument("--serve-params", metavar="FILE", help="JSON: combinations of the server's flags")
    parser.add_argument("--bench-params", metavar="FILE", help="JSON: combinations of the benchmark's flags")
    parser.add_argument("--link-vars", default="", help="SERVE=BENCH,...: only combinations where these are equal")
    parser.add_argument("-o", "--output-dir", default="results", type=Path)
    parser.add_argument("-e", "--experiment-name", help="folder below --output-dir; by default the time")
    parser.add_argument("--num-runs", type=int, default=3, help="of each combination")
    parser.add_argument("--dry-run", action="store_true", help="print the commands alone")
    parser.add_argument("--resume", action="store_true", help="run what has no result in the experiment's folder yet")


def run(arguments: argparse.Namespace) -> int:
    if arguments.num_runs < 1:
        raise UsageError(f"--num-runs {arguments.num_runs}: at least 1")
    if arguments.resume and not arguments.experiment_name:
        raise UsageError("--resume: --experiment-name says what to go on with")
    serve = read_params("--serve-params", arguments.serve_params)
    bench = read_params("--bench-params", arguments.bench_params)
    plan = combinations(serve, bench, read_links(arguments.link_vars))
    if not plan:
        raise UsageError("--link-vars: no combination is left")
    folder = arguments.output_dir / (arguments.experiment_name or time.strftime("%Y%m%d_%H%M%S"))
    if not arguments.resume and not arguments.dry_run and folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--experiment-name: {folder} has results; --resume goes on with them")
    this = _Sweep(arguments, folder)
    for params, on_server in plan:
        this.measure(params, on_server)
    if not arguments.dry_run:
        print(f"Results: {this.summarise(plan)}")
    return 0


class _Sweep:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments, self._folder = arguments, folder
        self._serve, self._bench = (_words(f, getattr(arguments, f)) for f in ("serve_cmd", "bench_cmd"))
        self._after = _words("after_bench_cmd", arguments.after_bench_cmd) if arguments.after_bench_cmd else None

    def file(self, combination: Combination, number: int) -> Path:
        return self._folder / combination.folder() / f"run-{number}.json"

    def measure(self, params: Params, combinations: list[Combination]) -> None:
        """What has no result yet, on one server; without a server where nothing is missing."""
        command = with_params(self._serve, params)
        numbers = range(self._arguments.num_runs)
        missing = [(each, n) for each in combinations for n in numbers if not self.file(each, n).exists()]
        if self._arguments.dry_run:
            print(shlex.join(command))
            for each, number in missing:
                print("  " + shlex.join(self._bench_command(each, self.file(each, number))))
            return
        if not missing:
            return
        print(f"Server: {shlex.join(command)}", flush=True)
        with self._server(command) as ask:
            for each, number in missing:
                self._run(each, number)
                self._clear(ask)

    def _bench_command(self, combination: Combination, file: Path) -> list[str]:
        command = with_params(self._bench, combination.bench)
        return [*command, "--save-result", "--result-dir", str(file.parent), "--result-filename", file.name]

    def _run(self, combination: Combination, number: int) -> None:
        """The result has its name when it is whole."""
        file = self.file(combination, number)
        partly = file.with_name(f".{file.name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        partly.unlink(missing_ok=True)
        command = self._bench_command(combination, partly)
        print(f"  {combination.folder()}, run {number}", flush=True)
        self._command(command)
        try:
            json.loads(partly.read_text("utf-8"))
        except (OSError, ValueError):
            raise StartError(f"{shlex.join(command)} wrote no result") from None
        partly.rename(file)

    def _clear(self, ask: str) -> None:
        """The next run must not find the prompts of this one in the prefix cache."""
        if self._after is not None:
            self._command(self._after)
            return
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{ask}/reset_prefix_cache", b""), timeout=ASK_S):
                return
        except (urllib.error.URLError, OSError) as error:
            advice = "give --after-bench-cmd, or `true` where the cache is off"
            raise StartError(f"POST {ask}/reset_prefix_cache: {error}; {advice}") from None

    def _command(self, command: list[str]) -> None:
        shown = None if self._arguments.show_stdout else subprocess.DEVNULL
        with raised_as(StartError, OSError, of=command[0]):
            ended = subprocess.run(command, stdout=shown, stdin=subprocess.DEVNULL, check=False)
        if ended.returncode:
            raise StartError(f"{shlex.join(command)} ended with {ended.returncode}")

    @contextmanager
    def _server(self, command: list[str]) -> Iterator[str]:
        host, port = address(command)
        ask = f"http://{host}:{port}"
        if _healthy(ask):
            raise StartError(f"{ask} is another server's already")
        shown, env = None if self._arguments.show_stdout else subprocess.DEVNULL, {**os.environ, **DEV_MODE}
        with raised_as(StartError, OSError, of=command[0]):
            process = subprocess.Popen(command, stdout=shown, stdin=subprocess.DEVNULL, start_new_session=True, env=env)
        try:
            self._ready(process, ask)
            yield ask
        finally:
            _stop(process)

    def _ready(self, process: "subprocess.Popen[bytes]", ask: str) -> None:
        until = time.monotonic() + self._arguments.server_ready_timeout
        while not _healthy(ask):
            if process.poll() is not None:
                raise StartError(f"the server ended with {process.returncode}; --show-stdout shows what it says")
            if time.monotonic() > until:
                raise StartError(f"the server was not ready in {self._arguments.server_ready_timeout:g} s")
            time.sleep(AGAIN_S)

    def summarise(self, plan: list[tuple[Params, list[Combination]]]) -> Path:
        """summary.json and summary.csv: a line for each run."""
        runs = [(each, n) for _, mine in plan for each in mine for n in range(self._arguments.num_runs)]
        lines = rows((each, number, json.loads(self.file(each, number).read_text("utf-8"))) for each, number in runs)
        (self._folder / "summary.json").write_text(json.dumps(lines, indent=1) + "\n")
        names = list(dict.fromkeys(name for line in lines for name in line))
        path: Path = self._folder / "summary.csv"
        with path.open("w", newline="") as out:
            writer: csv.DictWriter[Any] = csv.DictWriter(out, names)
            writer.writeheader()
            writer.writerows(lines)
        return path


def _words(name: str, text: str) -> list[str]:
    flag = "--" + name.replace("_", "-")
    with raised_as(UsageError, ValueError, of=f"{flag} {text}"):
        words = shlex.split(text)
    if not words:
        raise UsageError(f"{flag}: there is no command")
    return words


def _healthy(ask: str) -> bool:
    try:
        with urllib.request.urlopen(f"{ask}/health", timeout=ASK_S) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Ends the server, and after a while whatever is left of it."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
