"""Whatever a client sends or omits: an answer that names the fault, and nobody else notices.

Beside every case a stream runs whose tokens must all come, once and right (`undisturbed`).
"""

import contextlib
import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_clients import (
    AUTH,
    COMPLETIONS,
    KEY,
    MB,
    VOCAB,
    answer_of,
    connect,
    error_of,
    events,
    grows_less_than,
    head,
    is_free,
    logged,
    metric,
    post,
    reference,
    reset,
    send,
    undisturbed,
    until,
)
from serving import Serving, serving

pytestmark = pytest.mark.mesh
CONTEXT, STEP_MS = 4096, 2
CHAT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/tokenize", "/detokenize"
USER = {"role": "user", "content": "hi"}


FLAGS = (
    *("--device", "fake", "--max-model-len", str(CONTEXT), "--fake-step-ms", str(STEP_MS)),
    *("--api-key", KEY, "--drain-timeout", "0.5", "--trust-request-chat-template"),
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Serving]:
    with serving(*FLAGS) as server:
        yield server
    assert server.process.returncode == 0


@pytest.fixture(scope="module")
def client(mesh: Serving) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=mesh.url, headers=AUTH, timeout=30) as found:
        yield found


# --- bodies ---

NOT_JSON: dict[str, bytes] = {
    "nothing": b"",
    "cut": b'{"prompt": "x"',
    "more after": b'{"prompt": "x"} x',
    "word": b"prompt",
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "1e400": b'{"prompt": "x", "temperature": 1e400}',
    "array": b"[]",
    "null": b"null",
    "text": b'"prompt"',
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "cut in a character": '{"prompt": "ü"}'.encode()[:-3],
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "form": b"prompt=x&max_tokens=3",
}


NESTED = {"array": b'{"prompt": ' + b"[" * 100_000, "object": b'{"a":' * 100_000}


@pytest.mark.parametrize("body", NOT_JSON.values(), ids=NOT_JSON)
def test_no_json_object(client: httpx.Client, body: bytes) -> None:
    with undisturbed(client):
        for path in (COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE):
            check_not_json(client.post(path, content=body))


@pytest.mark.parametrize("body", NESTED.values(), ids=NESTED)
def test_json_nested_too_deeply(client: httpx.Client, body: bytes) -> None:
    with undisturbed(client):
        check_not_json(client.post(COMPLETIONS, content=body))


def check_not_json(answer: httpx.Response) -> None:
    """400, and no field is at fault but the whole body."""
    assert answer.status_code == 400
    error = error_of(answer)
    assert "body" in error["message"]
    assert error["param"] is None


HUGE = 10**30
BAD_FIELDS: dict[str, list[object]] = {
    "prompt": [None, "", [], [[]], [""], ["a", ""], 5, True, {"a": 1}, [1, "a"], [1.5], [True], [[[1]]]],
    "temperature": [-1, "warm", 1e308, HUGE, []],
    "top_p": [0, -0.5, 1.1, "x"],
    "top_k": [-5, 1.5, HUGE],
    "min_p": [2, -1],
    "n": [0, -1, 100_000, HUGE, "2", 1.5],
    "best_of": [1000, -1],
    "max_tokens": [0, -1, 1_000_000, 1 << 29, HUGE, "5", 1.5],
    "min_tokens": [-1, 17, HUGE],
    "presence_penalty": [3, "x"],
    "frequency_penalty": [-3],
    "repetition_penalty": [0, -1, HUGE],
    "seed": [1 << 64, "x", 0.5],
    "logprobs": [-1, 1000, "x"],
    "prompt_logprobs": [-1, 1000],
    "logit_bias": [[], {"a": 1}, {"-1": 1}, {"49152": 1}],
    "stop": [5, [1], "", [""], ["s"] * 10_000, [f"stop {number}" for number in range(10_000)], "x" * 100_000],
    "stop_token_ids": ["x", [-1], [VOCAB], [HUGE]],
    "allowed_token_ids": [[-1], [VOCAB]],
    "truncate_prompt_tokens": [0, -2],
    "stream": ["yes", 1],
    "stream_options": [5, {}],
    "echo": [1],
    "ignore_eos": ["x"],
    "timeout": [0, -1],
    "priority": [1 << 40],
    "model": [5],
}
LONG: list[tuple[str, dict[str, object], str]] = [
    (COMPLETIONS, {"prompt": [5] * CONTEXT}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 1_000_000}, "prompt"),
    (COMPLETIONS, {"prompt": "word " * 10_000}, "prompt"),
    (COMPLETIONS, {"prompt": [[5], [5] * 5000]}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 5000, "stream": True}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * (CONTEXT - 9), "max_tokens": 10}, "max_tokens"),
    (CHAT, {"messages": [USER], "max_tokens": CONTEXT}, "max_tokens"),
    (COMPLETIONS, {"prompt": [VOCAB]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], [1 << 40]]}, "prompt"),
    (COMPLETIONS, {"prompt": [HUGE]}, "prompt"),
    (DETOKENIZE, {"tokens": [VOCAB]}, "tokens"),
    (DETOKENIZE, {"tokens": [-1]}, "tokens"),
    (DETOKENIZE, {"tokens": [HUGE]}, "tokens"),
    (DETOKENIZE, {"tokens": "x"}, "tokens"),
    (DETOKENIZE, {}, "tokens"),
    (TOKENIZE, {}, "prompt"),
    (TOKENIZE, {"prompt": 5}, "prompt"),
    (TOKENIZE, {"prompt": "x", "messages": [USER]}, "prompt"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [5]}, "messages"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages"),
    (CHAT, {"messages": [USER], "chat_template": "{% for %}"}, "chat_template"),
    (CHAT, {"messages": [USER], "chat_template": "{{ raise_exception('no') }}"}, "messages"),
    (CHAT, {"messages": [USER], "chat_template": "{{ ''.__class__.__mro__ }}"}, "messages"),
    (CHAT, {"messages": [USER], "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": [USER], "max_completion_tokens": -1}, "max_completion_tokens"),
    (CHAT, {"messages": [USER], "response_format": {"type": "json_object"}}, "response_format"),
]
WRONG: list[tuple[str, dict[str, object], str]] = [
    *((COMPLETIONS, {"prompt": "x", name: value}, name) for name, values in BAD_FIELDS.items() for value in values),
    *LONG,
]


@pytest.mark.parametrize("param", [*BAD_FIELDS, *sorted({param for _, _, param in LONG} - BAD_FIELDS.keys())])
def test_wrong_fields_are_named(client: httpx.Client, param: str) -> None:
    with undisturbed(client):
        for path, body, name in WRONG:
            if name == param:
                answer = client.post(path, json=body)
                shown = f"{path} {json.dumps(body)[:100]}: {answer.text[:200]}"
                assert answer.status_code == 400, shown
                assert error_of(answer)["param"] == param, shown


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": "word " * 10_000}]}, "messages"),
        ({"messages": [USER], "max_completion_tokens": CONTEXT}, "max_completion_tokens"),
    ],
    ids=["messages", "max_completion_tokens"],
)
def test_a_chat_too_long_names_the_chats_field(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    with undisturbed(client):
        answer = client.post(CHAT, json=body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x"}),
        (COMPLETIONS, {"prompt": "x", "stream": True}),
        (CHAT, {"messages": [USER]}),
        (TOKENIZE, {"prompt": "x"}),
        (DETOKENIZE, {"tokens": [1]}),
    ],
)
def test_an_unknown_model(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    with undisturbed(client):
        for model in ("nope", "", "../../etc/passwd", "x" * 10_000):
            answer = client.post(path, json={**body, "model": model})
            assert answer.status_code == 404
            error = error_of(answer)
            assert (error["param"], error["type"]) == ("model", "not_found_error")


def test_an_unknown_field_is_a_warning(mesh: Serving, client: httpx.Client) -> None:
    with undisturbed(client):
        answer = client.post(COMPLETIONS, json={"prompt": [300], "max_tokens": 3, "temprature": 0.5})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert "warning" in logged(mesh, "field=temprature")


@pytest.mark.parametrize("rank", ["x", "-1", "٣", "1", "9" * 30])
def test_a_wrong_rank(client: httpx.Client, rank: str) -> None:
    with undisturbed(client):
        headers = httpx.Headers({b"X-data-parallel-rank": rank.encode()})
        answer = client.post(COMPLETIONS, json={"prompt": [300], "max_tokens": 3}, headers=headers, timeout=3)
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "X-data-parallel-rank"


def test_a_token_id_of_5000_digits(client: httpx.Client) -> None:
    with undisturbed(client):
        answer = client.post(COMPLETIONS, json={"prompt": "x", "logit_bias": {"9" * 5000: 1}})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "logit_bias"


def test_an_upgrade_that_is_not_wanted(client: httpx.Client) -> None:
    """Java's HttpClient offers HTTP/2 so; the request counts."""
    with undisturbed(client):
        headers = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAAQAAP__"}
        answer = client.post(COMPLETIONS, json={"prompt": [300], "max_tokens": 3}, headers=headers)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "cut", [b"Upgrade: h2c", b"ade: h2c", b": h2c", b"h2c"], ids=["before", "within", "colon", "after"]
)
def test_an_upgrade_in_two_segments(mesh: Serving, client: httpx.Client, cut: bytes) -> None:
    data = post({"prompt": [300], "max_tokens": 3}, "Connection: Upgrade", "Upgrade: h2c")
    place = data.index(cut)
    with undisturbed(client), connect(mesh) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(data[:place])
        assert client.get("/health").status_code == 200  # the first segment has been read
        sock.sendall(data[place:])
        assert answer_of(sock)[0] == 200


# --- sizes ---


@pytest.mark.parametrize(("framing", "allowed"), [("length", 8 * MB), ("chunked", 48 * MB)])
def test_a_body_of_100_mb(mesh: Serving, client: httpx.Client, framing: str, allowed: int) -> None:
    """Refused at --max-body-bytes (32 MB); the rest is not kept, and the connection is closed or still in step."""
    part = b" " * MB
    if framing == "length":
        parts = [head("POST", COMPLETIONS, f"Content-Length: {100 * MB}"), *[part] * 100]
    else:
        pieces = [b"%x\r\n%b\r\n" % (MB, part)] * 100
        parts = [head("POST", COMPLETIONS, "Transfer-Encoding: chunked"), *pieces, b"0\r\n\r\n"]
    with undisturbed(client), grows_less_than(allowed, mesh.pid("frontend")), connect(mesh) as sock:
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
def test_bad_headers(mesh: Serving, client: httpx.Client, data: bytes) -> None:
    with undisturbed(client), connect(mesh) as sock:
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


@pytest.mark.parametrize(
    ("start", "part"),
    list(ENDLESS.values()),
    ids=ENDLESS,
)
def test_headers_without_an_end(mesh: Serving, client: httpx.Client, start: bytes, part: bytes) -> None:
    """24 MB that never become a request must not become memory either."""
    with undisturbed(client), connect(mesh) as sock, grows_less_than(8 * MB, mesh.pid("frontend")):
        send(sock, [start, *[part] * 400])
        assert client.get("/health").status_code == 200  # what was sent has been read


# --- clients that leave, or do not read ---


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_hangs_up(mesh: Serving, client: httpx.Client, stream: bool) -> None:
    """Its choices would run for 8 s more; they end in the scheduler and all blocks are free."""
    body = {"prompt": [7] * 40, "n": 4, "max_tokens": 3900, "ignore_eos": True, "stream": stream}
    with undisturbed(client):
        socks = [connect(mesh), connect(mesh)]
        for number, sock in enumerate(socks):
            sock.sendall(post(body, f"X-Request-Id: left-{stream}-{number}"))
        until(lambda: metric(client, "num_requests_running") >= 8)
        assert metric(client, "kv_cache_usage_perc") > 0
        for number, (sock, leave) in enumerate(zip(socks, (socket.socket.close, reset), strict=True)):
            if stream:
                assert sock.recv(MB)
            leave(sock)
            line = logged(mesh, f"id=cmpl-left-{stream}-{number}")
            assert line.count("abort") == 4, line
    until(lambda: is_free(client), 4)


def test_a_client_that_hangs_up_with_a_request_in_the_pipeline() -> None:
    body = {"prompt": [8] * 40, "n": 4, "max_tokens": 3900, "ignore_eos": True, "stream": True}
    with serving(*FLAGS) as mesh, httpx.Client(base_url=mesh.url, headers=AUTH, timeout=2) as client:
        try:
            with undisturbed(client):
                with connect(mesh) as sock:
                    sock.sendall(post(body, "X-Request-Id: left") + head("GET", "/version"))
                    assert sock.recv(MB)
                assert logged(mesh, "id=cmpl-left", 1.5).count("abort") == 4
            assert not [line for line in mesh.lines if "RuntimeError" in line]
        finally:
            mesh.process.kill()  # it may be unable to end in good order


def test_many_clients_that_hang_up(mesh: Serving, client: httpx.Client) -> None:
    """Their tokens come between the hang-up and the frontend's knowing of it."""
    body = {"prompt": [9] * 40, "max_tokens": 3900, "ignore_eos": True, "stream": True}
    with undisturbed(client):
        for _ in range(4):
            socks = [connect(mesh) for _ in range(60)]
            for sock in socks:
                sock.sendall(post(body))
            for number, sock in enumerate(socks):
                assert sock.recv(1000)
                reset(sock) if number % 2 else sock.close()
    until(lambda: is_free(client))
    assert not [line for line in mesh.lines if "RuntimeError" in line]


@pytest.mark.parametrize("upto", [5, 60, 200, 10_000], ids=["line", "headers", "body", "all"])
def test_a_client_that_leaves_while_it_asks(mesh: Serving, client: httpx.Client, upto: int) -> None:
    data = post({"prompt": [7] * 100, "n": 4, "max_tokens": 3900, "ignore_eos": True})
    assert 200 < len(data) < 10_000
    already = len(mesh.lines)
    with undisturbed(client):
        for leave in (socket.socket.close, reset):
            sock = connect(mesh)
            sock.sendall(data[:upto])
            leave(sock)
    until(lambda: is_free(client), 4)
    with pytest.raises(AssertionError, match="did not come true"):
        until(lambda: any("Traceback" in line for line in mesh.lines[already:]), 0.3)


def test_a_client_that_never_ends_its_headers(mesh: Serving, client: httpx.Client) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(connect(mesh)).sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Le")
        with undisturbed(client):
            assert client.get("/health").status_code == 200


def test_a_client_that_does_not_read(mesh: Serving, client: httpx.Client) -> None:
    """10 MB for it, more than the kernel takes: they wait at the frontend until it reads, and are complete then."""
    prompt = [300 + number for number in range(40)]
    body = {"prompt": prompt, "n": 128, "max_tokens": 250, "ignore_eos": True, "return_token_ids": True, "stream": True}
    with undisturbed(client), connect(mesh, receive_buffer=4096) as sock:
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


# --- keys, methods, routes ---


STRANGERS: list[dict[str, Any]] = [
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Bearer"},
    {"Authorization": f"Basic {KEY}"},
    {"Authorization": f"Bearer {KEY}x"},
    {"Authorization": f"Bearer {KEY[:-1]}"},
    {"Authorization": "Bearer \u00fc".encode()},
    {"X-Api-Key": KEY},
]


def test_without_a_key(mesh: Serving, client: httpx.Client) -> None:
    with undisturbed(client), httpx.Client(base_url=mesh.url) as stranger:
        for headers in STRANGERS:
            for path in ("/v1/models", "/metrics", "/nowhere"):
                answer = stranger.get(path, headers=headers)
                assert answer.status_code == 401, headers
                assert error_of(answer)["type"] == "authentication_error"
            assert stranger.post(COMPLETIONS, json={"prompt": "x"}, headers=headers).status_code == 401, headers
        for path in ("/health", "/ready", "/ping"):
            assert stranger.get(path).status_code == 200


def test_a_huge_body_without_a_key(mesh: Serving, client: httpx.Client) -> None:
    start = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: mesh\r\nContent-Length: {100 * MB}\r\n\r\n"
    with undisturbed(client), grows_less_than(8 * MB, mesh.pid("frontend")), connect(mesh) as sock:
        send(sock, [start.encode(), *[b" " * MB] * 100])
        assert answer_of(sock)[0] == 401


def test_options(mesh: Serving, client: httpx.Client) -> None:
    """A browser asks before it sends the key."""
    wants = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with undisturbed(client):
        answer = httpx.options(f"{mesh.url}{COMPLETIONS}", headers={"Origin": "https://page.example", **wants})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert httpx.options(f"{mesh.url}{COMPLETIONS}").status_code == 405


def test_unknown_routes(client: httpx.Client) -> None:
    with undisturbed(client):
        for path in ("/", "/v1", "/v1/nope", "/v1/completions/x", "//", "/%00", "/..", "/v1/completions%2f"):
            for method in ("GET", "POST"):
                assert client.request(method, path).status_code in (404, 307), path


METHODS = [
    ("GET", COMPLETIONS, "POST"),
    ("PUT", CHAT, "POST"),
    ("DELETE", "/v1/models", "GET"),
    ("POST", "/health", "GET"),
    ("PATCH", TOKENIZE, "POST"),
    ("HEAD", DETOKENIZE, "POST"),
]


def test_methods_that_a_route_has_not(client: httpx.Client) -> None:
    with undisturbed(client):
        for method, path, allowed in METHODS:
            answer = client.request(method, path)
            assert answer.status_code == 405, path
            assert allowed in answer.headers["allow"]
