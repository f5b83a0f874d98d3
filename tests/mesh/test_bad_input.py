"""Whatever a client sends or omits: an answer that names the fault, and nobody else notices.

Beside every case a stream runs whose tokens must all come, once and right (`undisturbed`).
"""

import json
import socket
from typing import Any

import httpx
import pytest
from fake_answers import VOCAB, reference
from http_clients import (
    COMPLETIONS,
    CONTEXT,
    KEY,
    MB,
    answer_of,
    connect,
    error_of,
    grows_less_than,
    logged,
    post,
    send,
    undisturbed,
)
from serving import Serving

pytestmark = pytest.mark.mesh
CHAT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/tokenize", "/detokenize"
USER = {"role": "user", "content": "hi"}


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


def test_a_body_of_millions_of_arrays(client: httpx.Client, keyed: Serving) -> None:
    """Refused by its first 4 MB: no stream waits for its decoding, which took seconds and a gigabyte."""
    body = b'{"prompt": [' + b"[]," * 9_000_000 + b"[]]}"
    with undisturbed(client), grows_less_than(100 * MB, keyed.pid("frontend")):
        answer = client.post(COMPLETIONS, content=body)
    assert answer.status_code == 400
    assert "arrays and objects" in error_of(answer)["message"]


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
    "n": [0, -1, 100_000, HUGE, "two", 1.5],
    "best_of": [1000, -1],
    "max_tokens": [0, -1, 1_000_000, 1 << 29, HUGE, "5.5", 1.5],
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
    "allowed_token_ids": [[-1], [VOCAB], []],
    "thinking_token_budget": [0],
    "truncate_prompt_tokens": [0, -2],
    "stream": ["yes", 2],
    "stream_options": [5, {}],
    "echo": [2],
    "ignore_eos": ["x"],
    "timeout": [0, -1],
    "priority": [1 << 40, 1],
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
    (CHAT, {"messages": [{"role": "user"}]}, "messages"),
    (CHAT, {"messages": [USER], "chat_template": "{% for %}"}, "chat_template"),
    (CHAT, {"messages": [USER], "chat_template": "{{ raise_exception('no') }}"}, "messages"),
    (CHAT, {"messages": [USER], "chat_template": "{{ ''.__class__.__mro__ }}"}, "messages"),
    (CHAT, {"messages": [USER], "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": [USER], "max_completion_tokens": -1}, "max_completion_tokens"),
    (CHAT, {"messages": [USER], "response_format": {"type": "xml"}}, "response_format"),
    (CHAT, {"messages": [USER], "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": [USER], "thinking_token_budget": 5}, "thinking_token_budget"),
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


ALL = list(range(VOCAB))
BIAS = {str(token): 0.5 for token in ALL}
NO_FRAME: dict[str, tuple[str, dict[str, object], str]] = {
    "detokenize": (DETOKENIZE, {"tokens": [5] * 869_000}, "tokens"),
    "bias": (COMPLETIONS, {"prompt": ["x"] * 512, "logit_bias": BIAS}, "logit_bias"),
    "allowed": (COMPLETIONS, {"prompt": "x", "n": 64, "allowed_token_ids": ALL * 26}, "allowed_token_ids"),
    "stop": (COMPLETIONS, {"prompt": ["x"] * 2000, "stop": ["s" * 4000] * 60}, "stop"),
    "salt": (COMPLETIONS, {"prompt": ["x"] * 2000, "cache_salt": "s" * MB}, "cache_salt"),
    "prompt_logprobs": (COMPLETIONS, {"prompt": [5] * 4000, "n": 16, "prompt_logprobs": 20}, "prompt_logprobs"),
}


@pytest.mark.parametrize(("path", "body", "param"), NO_FRAME.values(), ids=NO_FRAME)
def test_what_no_frame_would_hold(client: httpx.Client, path: str, body: dict[str, object], param: str) -> None:
    """Each of these froze a link for ever, and all streams on it; /health and /ready said 200."""
    with undisturbed(client):
        answer = client.post(path, json=body)
        assert answer.status_code == 400, answer.text[:200]
        assert error_of(answer)["param"] == param
        assert "at most" in error_of(answer)["message"]
        assert client.get("/ready").status_code == 200


def test_long_lists_are_taken_once(client: httpx.Client) -> None:
    """A bias for the whole vocabulary is no misuse; and all of it is looked at."""
    with undisturbed(client):
        body = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True, "return_token_ids": True}
        lists = {"logit_bias": BIAS, "allowed_token_ids": ALL * 5}
        answer = client.post(COMPLETIONS, json={**body, **lists})
        assert answer.status_code == 200, answer.text[:200]
        assert answer.json()["choices"][0]["token_ids"] == reference([5, 6], 3)


def test_log_probabilities_of_a_whole_prompt(client: httpx.Client) -> None:
    with undisturbed(client):
        body = {"prompt": [5] * 4000, "n": 3, "max_tokens": 2, "prompt_logprobs": 20, "logprobs": 20}
        answer = client.post(COMPLETIONS, json=body)
        assert answer.status_code == 200, answer.text[:200]
        choices = answer.json()["choices"]
        assert [len(choice["prompt_logprobs"]) for choice in choices] == [4000] * 3
        assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [2] * 3


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
        for model in ("nope", " ", "../../etc/passwd", "x" * 10_000):
            answer = client.post(path, json={**body, "model": model})
            assert answer.status_code == 404
            error = error_of(answer)
            assert (error["param"], error["type"]) == ("model", "not_found_error")


def test_an_unknown_field_is_a_warning(keyed: Serving, client: httpx.Client) -> None:
    with undisturbed(client):
        answer = client.post(COMPLETIONS, json={"prompt": [300], "max_tokens": 3, "temprature": 0.5})
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert "warning" in logged(keyed, "field=temprature")
        assert client.post(TOKENIZE, json={"prompt": "x", "add_specials": 1}).status_code == 200
        assert "warning" in logged(keyed, "field=add_specials")


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
def test_an_upgrade_in_two_segments(keyed: Serving, client: httpx.Client, cut: bytes) -> None:
    data = post({"prompt": [300], "max_tokens": 3}, "Connection: Upgrade", "Upgrade: h2c")
    place = data.index(cut)
    with undisturbed(client), connect(keyed) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(data[:place])
        assert client.get("/health").status_code == 200  # the first segment has been read
        sock.sendall(data[place:])
        assert answer_of(sock)[0] == 200


# --- keys, methods, routes ---


STRANGERS: list[dict[str, Any]] = [
    {},
    {"Authorization": "Bearer wrong"},
    {"Authorization": "Bearer"},
    {"Authorization": f"Basic {KEY}"},
    {"Authorization": f"Bearer {KEY}x"},
    {"Authorization": f"Bearer {KEY[:-1]}"},
    {"Authorization": "Bearer \u00fc".encode()},
    {"X-Api-Key": f"{KEY}x"},
]


def test_without_a_key(keyed: Serving, client: httpx.Client) -> None:
    with undisturbed(client), httpx.Client(base_url=keyed.url) as stranger:
        for headers in STRANGERS:
            for path in ("/v1/models", "/metrics", "/nowhere"):
                answer = stranger.get(path, headers=headers)
                assert answer.status_code == 401, headers
                assert error_of(answer)["type"] == "authentication_error"
            assert stranger.post(COMPLETIONS, json={"prompt": "x"}, headers=headers).status_code == 401, headers
        for path in ("/health", "/ready", "/ping"):
            assert stranger.get(path).status_code == 200


def test_a_huge_body_without_a_key(keyed: Serving, client: httpx.Client) -> None:
    start = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: mesh\r\nContent-Length: {100 * MB}\r\n\r\n"
    with undisturbed(client), grows_less_than(8 * MB, keyed.pid("frontend")), connect(keyed) as sock:
        send(sock, [start.encode(), *[b" " * MB] * 100])
        assert answer_of(sock)[0] == 401


def test_options(keyed: Serving, client: httpx.Client) -> None:
    """A browser asks before it sends the key."""
    wants = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    with undisturbed(client):
        answer = httpx.options(f"{keyed.url}{COMPLETIONS}", headers={"Origin": "https://page.example", **wants})
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert "authorization" in answer.headers["access-control-allow-headers"]
        assert httpx.options(f"{keyed.url}{COMPLETIONS}").status_code == 405


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
