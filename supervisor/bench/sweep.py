"""What `meshlm bench sweep` runs: every combination of parameters of a server and of a benchmark. Pure: nothing is run here.

The command line, the files of parameters and the names of results are those of `vllm bench sweep serve`.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from meshlm.supervisor.errors import UsageError

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
    try:
        read = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{flag} {path}: {getattr(error, 'strerror', None) or error}") from None
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
    found = []
    for of_server in serve:
        mine = [
            Combination(of_server, each)
            for each in bench
            if all(one in of_server and other in each and of_server[one] == each[other] for one, other in pairs)
        ]
        if mine:
            found.append((of_server, mine))
    return found


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
