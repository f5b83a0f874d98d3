"""Request bodies that are no JSON object, nest too deep, or hold any values at all: taken, or refused with a 400 in words."""

import contextlib
import json
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parsing import ENDPOINTS, MAX_LOGPROBS, ask, asked, body_of

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai.parsed_request import ParsedRequest
from meshlm.frontend.openai.schema import ChatRequest, CompletionRequest
from meshlm.protocol.edges.text import ChatPrompt

# --- bodies that are no JSON object ---

BROKEN: list[tuple[bytes, str]] = [
    (b"", "JSON"),
    (b" ", "JSON"),
    (b"nonsense", "JSON"),
    (b'{"prompt": "a"', "JSON"),
    (b'{"prompt": "a"} trailing', "JSON"),
    (b"{'prompt': 'a'}", "JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "JSON"),
    (b'{"prompt": "a", "temperature": 1e999}', "JSON"),
    (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "JSON"),
    (b'{"prompt": "\\ud800"}', "JSON"),  # half a surrogate pair
    (b'{"prompt": "\\ud800 and more"}', "JSON"),
    (b'{"prompt": "\\udc00 and more"}', "JSON"),
    (b'{"prompt": "a\x00b"}', "JSON"),
    (b"\xef\xbb\xbf{}", "JSON"),
    (b'{"prompt": "\xff"}', "UTF-8"),
    (b'{"prompt": "\xc3"}', "UTF-8"),
    (b'{"\xff": 1}', "UTF-8"),
    (b'{"prompt": "\xed\xa0\x80"}', "UTF-8"),
    (b"null", "object"),
    (b"[]", "object"),
    (b'"prompt"', "object"),
    (b"3", "object"),
]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(("body", "word"), BROKEN, ids=lambda value: repr(value)[:40])
def test_broken_body(endpoint: str, body: bytes, word: str) -> None:
    with pytest.raises(HttpError, match=word) as caught:
        asked(endpoint, body)
    error = json.loads(caught.value.body())["error"]
    assert (caught.value.status, error["param"], error["type"]) == (400, None, "invalid_request_error")


def test_invalid_utf8_is_where_the_error_says() -> None:
    body = b'{"prompt": "ab\xff"}'
    with pytest.raises(HttpError, match=f"byte {body.index(0xFF)}$"):
        asked("text", body)


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"x":' * 100_000, b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}"])
def test_deep_nesting(body: bytes) -> None:
    with pytest.raises(HttpError, match=r"nested too deeply|must be a JSON object") as caught:
        asked("text", body)
    assert caught.value.status == 400


@pytest.mark.parametrize("depth", range(900, 1000, 3))
def test_nesting_that_some_of_us_still_take(depth: int) -> None:
    """How deep is too deep depends on the stack: what could be read may not be written again."""
    body = b'{"messages": [{"role": "user", "content": "hi", "x": ' + b"[" * depth + b"]" * depth + b"}]}"
    prompts: Sequence[object] = ()
    with contextlib.suppress(HttpError):
        prompts = asked("chat", body).mesh.prompts
    for prompt in prompts:
        assert isinstance(prompt, ChatPrompt)
        assert prompt.messages_json.count(b"[") == depth + 1


# --- anything at all ---

numbers = st.integers(-(1 << 66), 1 << 66) | st.integers(-3, 130) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ENDPOINTS), st.data())
def test_any_values_are_taken_or_refused_by_name(endpoint: str, data: st.DataObject) -> None:
    kind = CompletionRequest if endpoint == "text" else ChatRequest
    fields: dict[str, object] = data.draw(st.dictionaries(st.sampled_from(kind.__struct_fields__), values, max_size=3))
    got: ParsedRequest | HttpError
    try:
        got = ask(endpoint, **fields)
    except HttpError as error:
        got = error
    if isinstance(got, HttpError):
        assert got.status == 400
        assert got.param.partition(".")[0] in kind.__struct_fields__
    else:
        assert 1 <= got.answer.num_returned <= got.mesh.num_choices
        assert got.mesh.prompts
        assert max(got.answer.logprobs, got.answer.prompt_logprobs) <= MAX_LOGPROBS


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(ENDPOINTS), st.binary(max_size=60) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_refused(endpoint: str, body: bytes) -> None:
    with pytest.raises(HttpError) as caught:
        asked(endpoint, body)
    assert caught.value.status == 400


def many(before: bytes, item: bytes, after: bytes, size: int) -> bytes:
    return before + item * ((size - len(before) - len(after)) // len(item)) + after


USER_JSON = b'"messages":[{"role":"user","content":"x"}]'
LARGE: dict[str, tuple[str, bytes]] = {
    "ids": ("text", many(b'{"prompt":[1', b",12", b"]}", 5 << 20)),
    "many ids": ("text", many(b'{"prompt":[1', b",7", b"]}", 32 << 20)),
    "arrays in an unknown field": ("text", many(b'{"prompt":[1],"x":[[]', b",[]", b"]}", 32 << 20)),
    "arrays": ("text", many(b'{"prompt":[[]', b",[]", b"]}", 32 << 20)),
    "objects": ("chat", many(b'{"messages":[{}', b",{}", b"]}", 32 << 20)),
    "objects in tools": ("chat", many(b"{" + USER_JSON + b',"tools":[{}', b',{"a":1}', b"]}", 32 << 20)),
    "texts": ("text", many(b'{"prompt":["a"', b',"a"', b"]}", 32 << 20)),
    "fields": ("text", b'{"prompt":[1]' + b"".join(b',"k%d":1' % number for number in range(500_000)) + b"}"),
    "fields of an object": (
        "chat",
        b"{" + USER_JSON + b',"x":{"":1' + b"".join(b',"k%d":1' % number for number in range(500_000)) + b"}}",
    ),
}


@pytest.mark.parametrize(("endpoint", "body"), LARGE.values(), ids=LARGE)
def test_a_large_body_holds_nobody_up(endpoint: str, body: bytes) -> None:
    """It took up to 3 s, in which no stream went on. It is below 0.1 s now; this limit is for a slow and busy machine."""
    used = []
    for _ in range(2):
        begun = time.thread_time()
        with contextlib.suppress(HttpError):
            asked(endpoint, body)
        used.append(time.thread_time() - begun)
    assert min(used) < 0.8


def test_brackets_in_a_text_are_no_arrays() -> None:
    text = '[{"\\' * 200_000 + ", " * 100_000
    assert bodies.decode(body_of("text", {"prompt": text}), CompletionRequest)[0].prompt == text
    with pytest.raises(HttpError, match=r"more than \d+ arrays and objects"):
        ask("text", prompt=text, x=[[]] * 300_000)


@pytest.mark.parametrize("field", ["temperature", "prompt", "seed"])
def test_an_error_quotes_no_megabyte(field: str) -> None:
    with pytest.raises(HttpError) as error:
        ask("text", **{field: "x" * 30_000_000})
    assert len(error.value.body()) < 10_000
