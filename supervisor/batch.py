"""OpenAI's batch files: requests that come in by lines, many at a time to one server, and answers that go out in their order.

A line that is no request gets a line with its error, and the others run. Each request has an Idempotency-Key, so one whose frontend
dies is asked again and goes on. Both files are on this host or behind http(s). Called by cli/run_batch.py; it knows no mesh.
"""

import contextlib
import http.client
import json
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

from meshlm.supervisor.cli.terminal import Server
from meshlm.supervisor.errors import StartError, UsageError

Json = dict[str, Any]
# What a line may ask for. A path that the server lacks, since its model cannot do that, is the server's to refuse.
PATHS = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v2/embed"),
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/pooling", "/classify"),
)


class Request(NamedTuple):
    custom_id: str
    path: str
    body: Json


class LineError(Exception):
    """A line is no request. `custom_id` is the one that could be read."""

    def __init__(self, message: str, custom_id: str = "") -> None:
        super().__init__(message)
        self.custom_id = custom_id


def read_line(line: bytes, number: int) -> Request:
    """The request of line `number`, counted from 1. LineError says what is wrong with it."""
    begin = f"line {number}: "
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        raise LineError(f"{begin}is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise LineError(f"{begin}must be an object with custom_id, method, url and body")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str):
        raise LineError(f"{begin}custom_id must be a text")
    if found.get("method") != "POST":
        raise LineError(f"{begin}method must be POST", custom_id)
    if found.get("url") not in PATHS:
        raise LineError(f"{begin}url {str(found.get('url'))[:100]!r} is none of {', '.join(PATHS)}", custom_id)
    if not isinstance(body := found.get("body"), dict):
        raise LineError(f"{begin}body must be an object", custom_id)
    if body.get("stream"):
        raise LineError(f"{begin}body.stream: a batch has whole answers", custom_id)
    return Request(custom_id, found["url"], body)


def answered_line(custom_id: str, status: int, body: Json) -> bytes:
    """The line of an answer, or of what the server says against the request."""
    if status == 200:
        return _encoded_line(custom_id, status, body, None)
    return _encoded_line(custom_id, status, None, body)


def failed_line(custom_id: str, status: int, message: str) -> bytes:
    """The line of a request that was not sent, or that no server answered."""
    kind = "invalid_request_error" if status == 400 else "internal_error"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return _encoded_line(custom_id, status, None, {"error": error})


def _encoded_line(custom_id: str, status: int, body: Json | None, error: Json | None) -> bytes:
    response = {"status_code": status, "request_id": f"batch-{uuid.uuid4().hex}", "body": body}
    whole = {"id": f"batch_req-{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(whole, ensure_ascii=False).encode(errors="replace") + b"\n"


UPLOADS, UPLOAD_AGAIN_S, UPLOAD_TIMEOUT_S = 5, 5.0, 1000.0
TIMEOUT_S = 60.0  # in which some more of a file must come


def is_remote(name: str) -> bool:
    return name.startswith(("http://", "https://"))


@contextlib.contextmanager
def requests(name: str) -> Iterator[IO[bytes]]:
    """The input file, -i: open, to be read by lines."""
    try:
        if not is_remote(name):
            with Path(name).open("rb") as file:
                yield file
            return
        with tempfile.TemporaryFile() as file:  # the batch may take longer than a server leaves a connection open
            with urllib.request.urlopen(name, timeout=TIMEOUT_S) as answer:
                while part := answer.read(1 << 20):
                    file.write(part)
            file.seek(0)
            yield file
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UsageError(f"-i {name}: {_text_of(error)}") from None


@contextlib.contextmanager
def answers(name: str, folder: str | None) -> Iterator[IO[bytes]]:
    """The output file, -o: open, to be written. One behind http is a file in `folder` (--output-tmp-dir) until its end, and is PUT
    then, in several attempts."""
    if not is_remote(name):
        try:
            file = Path(name).open("wb")  # noqa: SIM115
        except (OSError, ValueError) as error:
            raise UsageError(f"-o {name}: {_text_of(error)}") from None
        with file:
            yield file
        return
    try:
        held = tempfile.NamedTemporaryFile("wb+", dir=folder, prefix="meshlm-batch-", suffix=".jsonl")  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"--output-tmp-dir {folder}: {_text_of(error)}") from None
    with held:
        yield held.file
        held.flush()
        _put(name, Path(held.name))


def _put(url: str, file: Path) -> None:
    for attempt in range(1, UPLOADS + 1):
        try:
            with file.open("rb") as data:
                headers = {"Content-Type": "application/jsonl", "Content-Length": str(file.stat().st_size)}
                asked = urllib.request.Request(url, data, headers, method="PUT")
                with urllib.request.urlopen(asked, timeout=UPLOAD_TIMEOUT_S):
                    return
        except (OSError, ValueError, http.client.HTTPException) as error:
            if attempt == UPLOADS:
                kept = file.with_name(f"{file.name}.kept")
                file.rename(kept)
                file.touch()  # whoever made it removes it
                raise StartError(f"-o {url}: {_text_of(error)}; the answers are in {kept}") from None
            time.sleep(UPLOAD_AGAIN_S)


def _text_of(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    return str(getattr(error, "strerror", None) or error)


CONCURRENT = 512  # requests on their way: each waits in a thread
AHEAD = 2 * CONCURRENT  # lines that are read before the first of them is answered
LOST_S = 600.0  # so long a request is asked again without an answer: frontends may die one after the other, and models load for minutes
AGAIN_S = 1.0
FULL_S = 3600.0  # so long a request waits for a server that has no room
ANSWER_S = 24 * 3600.0  # OpenAI's window of a batch


class Counts:
    def __init__(self) -> None:
        self.answered = self.failed = 0


def run(
    source: IO[bytes],
    out: IO[bytes],
    server: Server,
    told: Callable[[Counts], None] = lambda counts: None,
    ended: threading.Event | None = None,
) -> Counts:
    """Answers all lines of `source`; `told` hears of each line that is written. Once `ended` is set nobody is asked any more."""
    ended = ended or threading.Event()
    server = server._replace(base=server.base.removesuffix("/v1"))  # lines name it
    counts = Counts()
    pool = ThreadPoolExecutor(CONCURRENT, "batch")
    waiting: deque[Future[tuple[bool, bytes]]] = deque()

    def write(until: int) -> None:
        while len(waiting) > until:
            fine, line = waiting.popleft().result()
            out.write(line)
            counts.answered, counts.failed = counts.answered + fine, counts.failed + (not fine)
            told(counts)

    try:
        for request in _requests(source):
            waiting.append(pool.submit(_answer, server, request, ended))
            write(AHEAD)
        write(0)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return counts


def _requests(source: IO[bytes]) -> Iterator[Request | LineError]:
    """Each line that is not blank: its request, or what is wrong with it."""
    first: dict[str, int] = {}
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        try:
            request = read_line(line, number)
            if (known := first.setdefault(request.custom_id, number)) != number:
                raise LineError(f"line {number}: its custom_id is that of line {known}", request.custom_id)
        except LineError as error:
            yield error
        else:
            yield request


def _answer(server: Server, request: Request | LineError, ended: threading.Event) -> tuple[bool, bytes]:
    """Whether it is an answer, and its line. Called in a thread."""
    if isinstance(request, LineError):
        return False, failed_line(request.custom_id, 400, str(request))
    try:
        return _line(request.custom_id, *ask(server, request.path, request.body, ended))
    except (OSError, http.client.HTTPException) as error:
        return False, failed_line(request.custom_id, 500, f"no answer: {str(error) or type(error).__name__}")


def ask(
    server: Server, path: str, body: Json, ended: threading.Event, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """The status and the body of an answer. It is asked again while frontends die, or have no room; OSError or HTTPException where none
    answers for long, or once `ended` is set."""
    content = json.dumps(body, ensure_ascii=True).encode()
    headers = {"Idempotency-Key": uuid.uuid4().hex, **(headers or {})}
    lost_since = full_since = 0.0
    while True:
        try:
            with server.exchange("POST", path, content, ANSWER_S, headers) as response:
                status, answer = response.status, response.read()
        except (OSError, http.client.HTTPException):
            lost_since = lost_since or time.monotonic()
            if ended.is_set() or time.monotonic() - lost_since > LOST_S:
                raise
            ended.wait(AGAIN_S)
            continue
        lost_since, full_since = 0.0, full_since or time.monotonic()
        if status != 503 or ended.is_set() or time.monotonic() - full_since > FULL_S:
            return status, answer
        ended.wait(AGAIN_S)


def _line(custom_id: str, status: int, answer: bytes) -> tuple[bool, bytes]:
    try:
        found = json.loads(answer)
    except ValueError:
        text = f"HTTP {status}, and no JSON: {answer[:200].decode(errors='replace')}"
        return False, failed_line(custom_id, 500, text)
    return status == 200, answered_line(custom_id, status, found)
