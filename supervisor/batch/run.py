"""A batch, from its first line to its last: many requests at a time to one server, their answers in the order of the lines.

Each request has an Idempotency-Key, so one whose frontend dies is asked again and goes on.
Called by cli/run_batch.py; it knows no mesh.
"""

import http.client
import json
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, NamedTuple
from urllib.parse import urlsplit

from meshlm.supervisor.batch import lines

CONCURRENT = 512  # requests on their way: each waits in a thread
AHEAD = 2 * CONCURRENT  # lines that are read before the first of them is answered
LOST_S = 600.0  # so long a request is asked again without an answer: frontends may die one after the other, and models load for minutes
AGAIN_S = 1.0
FULL_S = 3600.0  # so long a request waits for a server that has no room
ANSWER_S = 24 * 3600.0  # OpenAI's window of a batch


class Server(NamedTuple):
    """The server that is asked."""

    is_tls: bool
    host: str
    port: int
    base: str
    headers: dict[str, str]

    @classmethod
    def of(cls, url: str, key: str) -> "Server":
        """ValueError for what is no address."""
        found = urlsplit(url)
        if found.scheme not in ("http", "https") or not found.hostname or found.query or not found.path.isascii():
            raise ValueError("must be like http://localhost:8000")
        is_tls = found.scheme == "https"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        base = found.path.rstrip("/").removesuffix("/v1")
        return cls(is_tls, found.hostname, found.port or (443 if is_tls else 80), base, headers)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        """Status and body of one answer. OSError and HTTPException when there is none."""
        kind = http.client.HTTPSConnection if self.is_tls else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=ANSWER_S)
        try:
            sent = {"Content-Type": "application/json", **self.headers, **headers}
            connection.request("POST", self.base + path, body, sent)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


class Counts:
    """The number of lines so far."""

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


def _requests(source: IO[bytes]) -> Iterator[lines.Request | lines.LineError]:
    """Each line that is not blank: its request, or what is wrong with it."""
    first: dict[str, int] = {}
    for number, line in enumerate(source, 1):
        if not line.strip():
            continue
        try:
            request = lines.read(line, number)
            if (known := first.setdefault(request.custom_id, number)) != number:
                raise lines.LineError(f"line {number}: its custom_id is that of line {known}", request.custom_id)
        except lines.LineError as error:
            yield error
        else:
            yield request


def _answer(server: Server, request: lines.Request | lines.LineError, ended: threading.Event) -> tuple[bool, bytes]:
    """Whether it is an answer, and its line. Called in a thread."""
    if isinstance(request, lines.LineError):
        return False, lines.failed(request.custom_id, 400, str(request))
    body = json.dumps(request.body, ensure_ascii=True).encode()
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    lost_since = full_since = 0.0
    while True:
        try:
            status, answer = server.post(request.path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            lost_since = lost_since or time.monotonic()
            if ended.is_set() or time.monotonic() - lost_since > LOST_S:
                return False, lines.failed(request.custom_id, 500, f"no answer: {str(error) or type(error).__name__}")
            ended.wait(AGAIN_S)
            continue
        lost_since, full_since = 0.0, full_since or time.monotonic()
        if status != 503 or ended.is_set() or time.monotonic() - full_since > FULL_S:
            return _line(request.custom_id, status, answer)
        ended.wait(AGAIN_S)


def _line(custom_id: str, status: int, answer: bytes) -> tuple[bool, bytes]:
    try:
        found = json.loads(answer)
    except ValueError:
        return False, lines.failed(
            custom_id, 500, f"HTTP {status}, and no JSON: {answer[:200].decode(errors='replace')}"
        )
    return status == 200, lines.answered(custom_id, status, found)
