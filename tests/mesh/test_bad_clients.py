"""Whatever a client does with its connection (too much, too little, leaving, not reading): nobody else notices.

Beside every case a stream runs whose tokens must all come, once and right (`undisturbed`).
"""

import contextlib
import http.client
import json
import select
import socket
import threading
import time

import httpx
import pytest
from fake_answers import reference
from http_clients import (
    AUTH,
    COMPLETIONS,
    FLAGS,
    MB,
    answer_of,
    connect,
    events,
    grows_less_than,
    head,
    is_free,
    logged,
    metric,
    post,
    reset,
    send,
    undisturbed,
)
from serving import Serving, serving
from waiting import until

pytestmark = pytest.mark.mesh


# --- sizes ---


@pytest.mark.parametrize(("framing", "allowed"), [("length", 8 * MB), ("chunked", 48 * MB)])
def test_a_body_of_100_mb(keyed: Serving, client: httpx.Client, framing: str, allowed: int) -> None:
    """Refused at --max-body-bytes (32 MB); the rest is not kept, and the connection is closed or still in step."""
    part = b" " * MB
    if framing == "length":
        parts = [head("POST", COMPLETIONS, f"Content-Length: {100 * MB}"), *[part] * 100]
    else:
        pieces = [b"%x\r\n%b\r\n" % (MB, part)] * 100
        parts = [head("POST", COMPLETIONS, "Transfer-Encoding: chunked"), *pieces, b"0\r\n\r\n"]
    with undisturbed(client), grows_less_than(allowed, keyed.pid("frontend")), connect(keyed) as sock:
        send(sock, parts)
        status, content = answer_of(sock)
        assert status == 413
        assert "--max-body-bytes" in json.loads(content)["error"]["message"]
        with contextlib.suppress(http.client.BadStatusLine, ConnectionResetError, BrokenPipeError):
            sock.sendall(head("GET", "/version"))
            assert answer_of(sock)[0] == 200


HEADERS: dict[str, bytes] = {
    "one": head("GET", "/v1/models", "X-Long: " + "x" * 100_000),
    "many": head("GET", "/v1/models", *(f"X-{number}: x" for number in range(10_000))),
    "key": head("GET", "/v1/models", "Authorization: Bearer " + "x" * 100_000),
    "name": head("GET", "/v1/models", "x" * 100_000 + ": x"),
    "no colon": head("GET", "/v1/models", "x"),
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 100,
    "path": head("GET", "/\xff"),
    "two lengths": head("POST", COMPLETIONS, "Content-Length: 3", "Content-Length: 4") + b"abcd",
    "negative length": head("POST", COMPLETIONS, "Content-Length: -1"),
    "huge length": head("POST", COMPLETIONS, "Content-Length: " + "9" * 40),
}


@pytest.mark.parametrize("data", HEADERS.values(), ids=HEADERS)
def test_bad_headers(keyed: Serving, client: httpx.Client, data: bytes) -> None:
    with undisturbed(client), connect(keyed) as sock:
        send(sock, [data])
        status, _ = answer_of(sock)
        assert status in (400, 404, 413, 431)


ENDLESS: dict[str, tuple[bytes, bytes]] = {
    "headers": (b"GET / HTTP/1.1\r\n", b"X: y\r\n" * 10_000),
    "header": (b"GET / HTTP/1.1\r\nX-Long: ", b"x" * 60_000),
    "name": (b"GET / HTTP/1.1\r\n", b"x" * 60_000),
    "URL": (b"GET /", b"x" * 60_000),
    "trailers": (head("POST", "/health", "Transfer-Encoding: chunked") + b"0\r\n", b"X: y\r\n" * 10_000),
}


@pytest.mark.parametrize(("start", "part"), list(ENDLESS.values()), ids=ENDLESS)
def test_headers_without_an_end(keyed: Serving, client: httpx.Client, start: bytes, part: bytes) -> None:
    """24 MB that never become a request must not become memory either."""
    with undisturbed(client), connect(keyed) as sock, grows_less_than(8 * MB, keyed.pid("frontend")):
        send(sock, [start, *[part] * 400])
        assert client.get("/health").status_code == 200  # what was sent has been read


def test_tiny_heads_in_one_pipeline(keyed: Serving, client: httpx.Client) -> None:
    """512 KiB of them held a frontend for 10 s, and it was killed as stuck. Nobody notices now, and no key is needed to try."""
    pid, tiny = keyed.pid("frontend"), b"GET / HTTP/1.1\r\n\r\n"
    with undisturbed(client), connect(keyed) as sock, grows_less_than(24 * MB, pid):
        sender = threading.Thread(target=send, args=(sock, [tiny * 1000] * 28))
        sender.start()
        for _ in range(10):
            begun = time.monotonic()
            assert client.get("/health").status_code == 200
            assert time.monotonic() - begun < 1
        sock.shutdown(socket.SHUT_RDWR)
        sender.join(10)
    assert keyed.pid("frontend") == pid


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_bodies_that_never_end(keyed: Serving, client: httpx.Client, framing: str) -> None:
    """Together they may take --max-incoming-bytes (32 MB here): then 503, at once, while small requests are served."""
    field = f"Content-Length: {20 * MB}" if framing == "length" else "Transfer-Encoding: chunked"
    part = b" " * MB if framing == "length" else b"%x\r\n%b\r\n" % (MB, b" " * MB)
    with undisturbed(client), contextlib.ExitStack() as stack:
        with grows_less_than(100 * MB, keyed.pid("frontend")):
            socks = [stack.enter_context(connect(keyed)) for _ in range(12)]
            for sock in socks:
                send(sock, [head("POST", COMPLETIONS, field), *[part] * 8])
            assert client.post(COMPLETIONS, json={"prompt": [1], "max_tokens": 1}).status_code == 200
        refused = [sock for sock in socks if select.select([sock], [], [], 0)[0]]
        assert 8 <= len(refused) <= 9
        status, content = answer_of(refused[0])
        assert status == 503
        assert "--max-incoming-bytes" in json.loads(content)["error"]["message"]
    body = {"prompt": [1], "max_tokens": 1, "user": "x" * 30 * MB}
    until(lambda: client.post(COMPLETIONS, json=body).status_code == 200)  # all was given back


@pytest.mark.parametrize(
    "half", [b"GET /health HT", head("POST", COMPLETIONS, "Content-Length: 9") + b"{"], ids=["head", "body"]
)
def test_half_a_request_is_waited_for_so_long(keyed: Serving, client: httpx.Client, half: bytes) -> None:
    """2 and 5 s here (--http-header-timeout, --http-body-timeout)."""
    with undisturbed(client), connect(keyed) as sock:
        sock.sendall(half)
        status, content = answer_of(sock)
        assert status == 408
        assert json.loads(content)["error"]["code"] == 408
        assert sock.recv(1) == b""


def test_http_1_0_gets_no_chunks(keyed: Serving, client: httpx.Client) -> None:
    """The end of the connection is the end of the answer."""
    body = {"prompt": [7, 8], "max_tokens": 20, "ignore_eos": True, "stream": True}
    found = []
    for version in (b"HTTP/1.1", b"HTTP/1.0"):
        with connect(keyed) as sock:
            sock.sendall(post({**body, "return_token_ids": True}).replace(b"HTTP/1.1", version))
            answer = http.client.HTTPResponse(sock)
            answer.begin()
            assert answer.headers["Date"]
            assert (answer.headers["Transfer-Encoding"] is None) == (version == b"HTTP/1.0")
            lines = answer.read().decode().splitlines()
            chosen = [choice for event in events(lines) for choice in event["choices"]]
            found.append([token for choice in chosen for token in choice["token_ids"]])
    assert found == [reference([7, 8], 20)] * 2


# --- clients that leave, or do not read ---


def test_clients_that_never_read_are_cut_off(keyed: Serving, client: httpx.Client) -> None:
    """After 4 s here (--http-send-timeout); then their requests end."""
    body = {
        "prompt": [11] * 40,
        "n": 16,
        "max_tokens": 3900,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    with undisturbed(client), connect(keyed, receive_buffer=4096) as sock:
        sock.sendall(post(body, "X-Request-Id: deaf"))
        assert "abort" in logged(keyed, "id=cmpl-deaf", 30)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while more := sock.recv(MB):
                received += more
        assert received.startswith(b"HTTP/1.1 200 ")
        assert b"[DONE]" not in received
        assert not received.endswith(b"\r\n0\r\n\r\n"), "it looks like the end of an answer"
    until(lambda: is_free(client))


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_hangs_up(keyed: Serving, client: httpx.Client, stream: bool) -> None:
    """Its choices would run for 8 s more; they end in the scheduler and all blocks are free."""
    body = {"prompt": [7] * 40, "n": 4, "max_tokens": 3900, "ignore_eos": True, "stream": stream}
    with undisturbed(client):
        socks = [connect(keyed), connect(keyed)]
        for number, sock in enumerate(socks):
            sock.sendall(post(body, f"X-Request-Id: left-{stream}-{number}"))
        until(lambda: metric(client, "num_requests_running") >= 8)
        assert metric(client, "kv_cache_usage_perc") > 0
        for number, (sock, leave) in enumerate(zip(socks, (socket.socket.close, reset), strict=True)):
            if stream:
                assert sock.recv(MB)
            leave(sock)
            line = logged(keyed, f"id=cmpl-left-{stream}-{number}")
            assert line.count("abort") == 4, line
    until(lambda: is_free(client), 4)


def test_a_client_that_hangs_up_with_a_request_in_the_pipeline() -> None:
    body = {"prompt": [8] * 40, "n": 4, "max_tokens": 3900, "ignore_eos": True, "stream": True}
    with serving(*FLAGS) as keyed, httpx.Client(base_url=keyed.url, headers=AUTH, timeout=2) as client:
        try:
            with undisturbed(client):
                with connect(keyed) as sock:
                    sock.sendall(post(body, "X-Request-Id: left") + head("GET", "/version"))
                    assert sock.recv(MB)
                assert logged(keyed, "id=cmpl-left", 1.5).count("abort") == 4
            assert not [line for line in keyed.lines if "RuntimeError" in line]
        finally:
            keyed.process.kill()  # it may be unable to end in good order


def test_many_clients_that_hang_up(keyed: Serving, client: httpx.Client) -> None:
    """Their tokens come between the hang-up and the frontend's knowing of it."""
    body = {"prompt": [9] * 40, "max_tokens": 3900, "ignore_eos": True, "stream": True}
    with undisturbed(client):
        for _ in range(4):
            socks = [connect(keyed) for _ in range(60)]
            for sock in socks:
                sock.sendall(post(body))
            for number, sock in enumerate(socks):
                assert sock.recv(1000)
                reset(sock) if number % 2 else sock.close()
    until(lambda: is_free(client))
    assert not [line for line in keyed.lines if "RuntimeError" in line]


@pytest.mark.parametrize("upto", [5, 60, 200, 10_000], ids=["line", "headers", "body", "all"])
def test_a_client_that_leaves_while_it_asks(keyed: Serving, client: httpx.Client, upto: int) -> None:
    data = post({"prompt": [7] * 100, "n": 4, "max_tokens": 3900, "ignore_eos": True})
    assert 200 < len(data) < 10_000
    already = len(keyed.lines)
    with undisturbed(client):
        for leave in (socket.socket.close, reset):
            sock = connect(keyed)
            sock.sendall(data[:upto])
            leave(sock)
    until(lambda: is_free(client), 4)
    with pytest.raises(AssertionError, match="did not come true"):
        until(lambda: any("Traceback" in line for line in keyed.lines[already:]), 0.3)


def test_a_client_that_never_ends_its_headers(keyed: Serving, client: httpx.Client) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(connect(keyed)).sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
        with undisturbed(client):
            assert client.get("/health").status_code == 200


def test_a_client_that_does_not_read(keyed: Serving, client: httpx.Client) -> None:
    """10 MB for it, more than the kernel takes: they wait at the frontend until it reads, and are complete then."""
    prompt = [300 + number for number in range(40)]
    body = {"prompt": prompt, "n": 128, "max_tokens": 250, "ignore_eos": True, "return_token_ids": True, "stream": True}
    with undisturbed(client), connect(keyed, receive_buffer=4096) as sock:
        before = metric(client, "prefix_cache_queries_total")
        sock.sendall(post(body))
        until(lambda: metric(client, "prefix_cache_queries_total") > before + 120 * len(prompt))  # they have begun
        until(lambda: metric(client, "num_requests_running") <= 1)
        check_choices(sock, 128, prompt, 250)


def check_choices(sock: socket.socket, num_choices: int, prompt: list[int], count: int) -> None:
    """Read a stream to its end: every choice has all its tokens in order, and ends once."""
    answer = http.client.HTTPResponse(sock)
    answer.begin()
    ids: list[list[int]] = [[] for _ in range(num_choices)]
    reasons: list[list[str]] = [[] for _ in range(num_choices)]
    for event in events(line.decode().rstrip("\n") for line in answer):
        for choice in event["choices"]:
            ids[choice["index"]] += choice["token_ids"]
            reasons[choice["index"]] += [choice["finish_reason"]] if choice["finish_reason"] else []
    wanted = reference(prompt, count)
    wrong = [index for index in range(num_choices) if ids[index] != wanted]
    assert not wrong, f"{len(wrong)} of {num_choices} choices are wrong, the first with {len(ids[wrong[0]])} tokens"
    assert reasons == [["length"]] * num_choices
