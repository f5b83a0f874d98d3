"""Clients of all kinds for the tests of bad input: raw ones, ones that leave, and one that nothing may disturb."""

import contextlib
import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from fake_answers import reference
from serving import Serving
from waiting import until

KEY = "secret"
CONTEXT, STEP_MS = 4096, 2
STREAM_TOKENS = 16
AUTH = {"Authorization": f"Bearer {KEY}"}
COMPLETIONS = "/v1/completions"
MB = 1 << 20
FLAGS = (
    *("--device", "fake", "--max-model-len", str(CONTEXT), "--fake-step-ms", str(STEP_MS)),
    *(
        "--http-header-timeout",
        "2",
        "--http-body-timeout",
        "2",
        "--http-send-timeout",
        "4",
        "--max-incoming-bytes",
        str(32 << 20),
    ),
    *("--api-key", KEY, "--drain-timeout", "0.5", "--trust-request-chat-template"),
)


@contextlib.contextmanager
def undisturbed(client: httpx.Client) -> Iterator[None]:
    """Streams run, one after the other, from before the block until after it; each must be complete and right."""
    running, over = threading.Event(), threading.Event()

    def stream(number: int) -> None:
        prompt = [400 + number, 401]
        body = {"prompt": prompt, "max_tokens": STREAM_TOKENS, "ignore_eos": True, "return_token_ids": True}
        ids: list[int] = []
        reasons: list[str] = []
        with client.stream("POST", COMPLETIONS, json={**body, "stream": True}) as answer:
            assert answer.status_code == 200
            for event in events(answer.iter_lines()):
                (choice,) = event["choices"]
                ids += choice["token_ids"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
                if ids:
                    running.set()
        assert ids == reference(prompt, STREAM_TOKENS)
        assert reasons == ["length"]

    def streams() -> None:
        number = 0
        try:
            while number == 0 or not over.is_set():
                stream(number)
                number += 1
        finally:
            running.set()

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(streams)
        try:
            assert running.wait(10), "the stream beside the case did not start"
            yield
        finally:
            over.set()
            beside.result(timeout=35)


def events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The JSON of a stream's events; AssertionError unless it ends with [DONE]."""
    line = ""
    for line in filter(None, lines):
        assert line.startswith("data: "), line
        if line != "data: [DONE]":
            event: dict[str, Any] = json.loads(line[6:])
            assert "error" not in event, line
            yield event
    assert line == "data: [DONE]"


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object, in OpenAI's form and nothing beside it."""
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] == answer.status_code
    return error


def connect(mesh: Serving, receive_buffer: int = 0) -> socket.socket:
    sock = socket.socket()
    sock.settimeout(30)
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect(("127.0.0.1", mesh.port))
    return sock


def head(method: str, path: str, *more: str) -> bytes:
    lines = (f"{method} {path} HTTP/1.1", "Host: localhost", f"Authorization: Bearer {KEY}", *more)
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


def post(body: dict[str, Any], *more: str) -> bytes:
    content = json.dumps(body).encode()
    return (
        head("POST", COMPLETIONS, "Content-Type: application/json", f"Content-Length: {len(content)}", *more) + content
    )


def send(sock: socket.socket, parts: Iterable[bytes]) -> None:
    """All parts, or as many as the server takes before it closes."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for part in parts:
            sock.sendall(part)


def answer_of(sock: socket.socket) -> tuple[int, bytes]:
    answer = http.client.HTTPResponse(sock)
    answer.begin()
    return answer.status, answer.read()


def reset(sock: socket.socket) -> None:
    """Close with RST, as a client does that was killed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"meshlm:{name}{{"))


def logged(mesh: Serving, text: str, limit_s: float = 5) -> str:
    """The first line of the log with this text."""
    until(lambda: any(text in line for line in mesh.lines), limit_s)
    return next(line for line in mesh.lines if text in line)


def is_free(client: httpx.Client) -> bool:
    """Nothing runs or waits, and no KV block is in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return not any(metric(client, name) for name in names)


@contextlib.contextmanager
def grows_less_than(limit: int, pid: int) -> Iterator[None]:
    """At no time within the block does the process take more memory than at its start and `limit` bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # begin the kernel's peak anew
    before = _peak_bytes(pid)
    yield
    grown = _peak_bytes(pid) - before
    assert grown < limit, f"grew by {grown / MB:.0f} MB"


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
