"""A large body is read beside the loop, one after the other, and its longest lists are refused before anything decodes them."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from doubles import backend_without_mesh
from parsing import RESOLVED
from waiting import until

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import limits
from meshlm.frontend.routes.application import Application

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
MB = 1 << 20
LONG = "x" * bodies.LARGE_BYTES


def client(**server: Any) -> tuple[Application, httpx.AsyncClient]:
    routes = Application(backend_without_mesh(**server))
    transport, headers = httpx.ASGITransport(routes.app()), {"Content-Type": "application/json"}
    return routes, httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


@pytest.mark.parametrize("path", PATHS)
async def test_large_ones_are_read_in_a_thread_one_after_the_other(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three clients that sent 8 MB each without a pause had the loop to themselves."""
    decode, reading, most, threads = bodies.decode, 0, 0, set[int]()

    def noted(body: bytes, *rest: Any) -> Any:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        threads.add(threading.get_ident())
        try:
            return decode(body, *rest)
        finally:
            reading -= 1

    monkeypatch.setattr(bodies, "decode", noted)
    of_path: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
        "/tokenize": {"prompt": "x"},
    }
    fields = {**of_path.get(path, {"messages": [{"role": "user", "content": "x"}]}), "model": "no such"}
    routes, http = client()
    async with http:
        large = json.dumps({**fields, "user": LONG})
        answers = await asyncio.gather(*(http.post(path, content=large) for _ in range(3)))
        assert [answer.status_code for answer in answers] == [404] * 3
        assert threading.get_ident() not in threads
        assert most == 1
        assert routes.reader._incoming.num_bytes == 0
        assert (await http.post(path, json=fields)).status_code == 404
        assert threading.get_ident() in threads, "small ones are read at once"


async def test_a_large_body_counts_until_it_is_read() -> None:
    """Those that wait for their turn are in memory."""
    routes, http = client(max_incoming_bytes=4 * len(LONG))
    async with http, routes.reader.reads_large:
        body = json.dumps({"prompt": "x", "model": "no such", "user": LONG + LONG})
        waiting = asyncio.ensure_future(http.post("/v1/completions", content=body))
        await asyncio.to_thread(until, lambda: routes.reader._incoming.num_bytes > 0)
        answer = await http.post("/v1/completions", content=body + " " * 2 * len(LONG))
        assert answer.status_code == 503
        assert "--max-incoming-bytes" in answer.json()["error"]["message"]
        assert not waiting.done()
        routes.reader.reads_large.release()
        assert (await waiting).status_code == 404
        await routes.reader.reads_large.acquire()


MANY_IDS = ["x"] * (limits.MAX_LISTED_IDS + 1)  # no ids: whoever decodes them says so
LISTS = [
    ("/v1/completions", "allowed_token_ids", MANY_IDS),
    ("/v1/completions", "stop_token_ids", MANY_IDS),
    ("/v1/chat/completions", "allowed_token_ids", MANY_IDS),
    ("/v1/completions", "logit_bias", {f"x{number}": 1 for number in range(limits.MAX_LISTED_IDS + 1)}),
    ("/v1/completions", "prompt", [1, *["x"] * (bodies.LARGE_BYTES // 4)]),
    ("/detokenize", "tokens", MANY_IDS),
]


@pytest.mark.parametrize(("path", "field", "value"), LISTS)
async def test_a_list_that_is_too_long_is_not_decoded(path: str, field: str, value: object) -> None:
    """1,300,000 allowed ids took 0.1 s until they were refused."""
    _, http = client()
    async with http:
        fields = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], field: value}
        answer = await http.post(path, json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert "at most" in error["message"]
    assert str(len(value)) in error["message"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "' + LONG.encode() + b'", "stop": "\xff"}', "UTF-8"),
        (b'{"user": "' + LONG.encode() + b'", "temperature": 1e999}', "of the field 'temperature'"),
        (b'{"prompt": [[1], [' + b"1," * len(LONG) + b"1], [1e999]]}", "of the field 'prompt'"),
        (b'["' + LONG.encode() + b'"]', "must be a JSON object"),
        (b'{"prompt": "' + LONG.encode() + b'"', "not valid JSON"),
        (b"{" + b",".join(b'"k%d": 1' % number for number in range(50_000)) + b"}", "50000 fields"),
    ],
    ids=["utf-8", "number", "number of a prompt", "array", "cut", "fields"],
)
async def test_what_is_wrong_with_a_large_body_is_said(body: bytes, words: str) -> None:
    _, http = client()
    async with http:
        answer = await http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS[:3])
async def test_texts_that_are_too_long_are_not_looked_at(path: str) -> None:
    """26 MB of escaped quotes took 0.7 s until they were refused."""
    _, http = client()
    most = max(limits.MIN_PROMPT_BYTES, limits.BYTES_PER_TOKEN * RESOLVED.max_model_len)
    field = "messages" if "chat" in path else "prompt"
    text = b'"' + b'[{\\"' * (2 * most) + b'"'
    value = b'[{"role": "user", "content": %b}]' % text if field == "messages" else text
    async with http:
        answer = await http.post(path, content=b'{"%b": %b, "x": 1e999}' % (field.encode(), value))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), "before what is wrong behind it"
    assert str(most) in answer.json()["error"]["message"]


NUMBERS = b"[1" + b",1" * bodies.MAX_IN_LIST + b"]"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "x", "unknown": %b}' % NUMBERS,
        b'{"prompt": "x", "metadata": {"a": {"b": %b}}}' % NUMBERS,
        b'{"prompt": [[1], %b]}' % NUMBERS,
        b'{"prompt": "x", "messages": [{"role": "user", "content": [{"type": "text", "text": %b}]}]}' % NUMBERS,
        b'{"prompt": "x", "a": {"b": {"c": {"d": {"e": {"f": {"g": {"h": %b}}}}}}}}' % NUMBERS,
    ],
    ids=["field", "object", "prompt", "message", "deep"],
)
async def test_no_list_is_too_long_wherever_it_is(body: bytes) -> None:
    """Six million numbers in a field that nobody reads held the loop up for 0.2 s: to decode them, and to free them."""
    _, http = client()
    async with http:
        answer = await http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert f"more than {bodies.MAX_IN_LIST} values" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("value", "most", "words"),
    [
        (b"[]", bodies.MAX_CONTAINERS - 2, "arrays and objects"),  # the body and the list itself are two
        (b'""', bodies.MAX_TEXTS - 1, "texts and names"),  # the name is one
        (b"1", bodies.MAX_VALUES + 1, "values"),
    ],
)
def test_a_body_holds_so_much(value: bytes, most: int, words: str) -> None:
    bodies.check_counts(b'{"x": [' + b",".join([value] * most) + b"]}")
    with pytest.raises(HttpError, match=f"more than [0-9]+ {words}"):
        bodies.check_counts(b'{"x": [' + b",".join([value] * (most + 1)) + b"]}")


async def test_a_body_that_has_too_much_is_not_read_to_its_end() -> None:
    """Thirty megabytes of empty lists would be kept, and looked at, for nothing."""
    num_sent = 0

    async def lists() -> AsyncIterator[bytes]:
        nonlocal num_sent
        yield b'{"prompt": ['
        for _ in range(30):
            num_sent += 1
            yield b"[]," * (MB // 3)

    _, http = client()
    async with http:
        answer = await http.post("/v1/completions", content=lists())
    assert answer.status_code == 400
    assert num_sent == 4, "four megabytes tell it"
    assert "arrays and objects" in answer.json()["error"]["message"]


def test_commas_in_texts_are_no_values() -> None:
    text = "," * (bodies.MAX_IN_LIST + 2)
    fields = {
        "prompt": text,
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}],
        "stop": [text],
    }
    assert bodies.fields_of(json.dumps(fields).encode(), longest=bodies.MAX_IN_LIST) == fields


def test_a_list_of_prompts_is_the_same_in_pieces() -> None:
    prompts = [[1, 2, 3.0], list(range(bodies.LARGE_BYTES)), [], ["text", {"a": [None, True]}]]
    fields = {"prompt": prompts, "n": 2, "messages": [{"content": LONG}, {"content": "é\n"}]}
    for indent in (None, 1):
        assert bodies.fields_of(json.dumps(fields, indent=indent).encode()) == fields
