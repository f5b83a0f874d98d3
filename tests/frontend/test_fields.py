"""No field of vLLM's or OpenAI's request bodies is ignored in silence: each is honoured, refused by name, or known to be needless."""

import json

import pytest
from msgspec import Struct
from parsing import ENDPOINTS, ask, refused
from request_fields import (
    OPENAI_CHAT,
    OPENAI_COMPLETION,
    OPENAI_STREAM_OPTIONS,
    VLLM_CHAT,
    VLLM_COMPLETION,
    VLLM_DETOKENIZE,
    VLLM_PATHS,
    VLLM_STREAM_OPTIONS,
    VLLM_TOKENIZE,
)

from meshlm.frontend import bodies
from meshlm.frontend.errors import why_not_served
from meshlm.frontend.operations import served
from meshlm.frontend.schema import (
    ASKS_FOR_NOTHING,
    NEEDLESS,
    NOT_SUPPORTED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)


@pytest.mark.parametrize(
    ("kind", "names", "prefix"),
    [
        (CompletionRequest, VLLM_COMPLETION | OPENAI_COMPLETION, ""),
        (ChatRequest, VLLM_CHAT | OPENAI_CHAT, ""),
        (TokenizeRequest, VLLM_TOKENIZE, ""),
        (DetokenizeRequest, VLLM_DETOKENIZE, ""),
        (StreamOptions, VLLM_STREAM_OPTIONS | OPENAI_STREAM_OPTIONS, "stream_options."),
    ],
)
def test_every_field_is_honoured_refused_or_needless(kind: type[Struct], names: frozenset[str], prefix: str) -> None:
    known = NOT_SUPPORTED.keys() | NEEDLESS.keys()
    left = names - set(kind.__struct_fields__)
    assert {f"{prefix}{name}" for name in left} - known == set()


def test_a_field_has_one_answer() -> None:
    assert NOT_SUPPORTED.keys() & NEEDLESS.keys() == set()
    for kind in (CompletionRequest, ChatRequest):
        assert set(kind.__struct_fields__) & (NOT_SUPPORTED.keys() | NEEDLESS.keys()) == set()
    assert ASKS_FOR_NOTHING.keys() <= NOT_SUPPORTED.keys()


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("field", NOT_SUPPORTED)
def test_what_would_change_the_answer_is_not_ignored(endpoint: str, field: str) -> None:
    assert ask(endpoint, **{field: None}) == ask(endpoint)
    raised, error = refused(endpoint, {field: {"type": "object"}})
    assert (raised.status, error["param"]) == (400, field)
    assert "supported" in str(error["message"])


@pytest.mark.parametrize("value", [{}, "", [], False])
def test_an_empty_value_of_another_field_asks_for_nothing(value: object) -> None:
    for field in NOT_SUPPORTED.keys() - ASKS_FOR_NOTHING.keys():
        assert ask("chat", **{field: value}) == ask("chat")


@pytest.mark.parametrize(
    ("fields", "fine"),
    [
        ({"function_call": "none"}, True),
        ({"function_call": {"name": "f"}}, False),
        ({"web_search_options": {}}, False),
        ({"verbosity": "medium"}, True),
        ({"verbosity": "low"}, False),
        ({"return_token_offsets": False}, True),
        ({"vllm_xargs": {"a": 1}}, False),
        ({"ec_transfer_params": {"a": 1}}, False),
        ({"logprob_token_ids": [1, 2]}, False),
    ],
)
def test_values_that_ask_for_nothing(fields: dict[str, object], fine: bool) -> None:
    if fine:
        assert ask("chat", **fields) == ask("chat")
    else:
        assert refused("chat", fields)[1]["param"] == next(iter(fields))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_needless_fields_change_nothing_and_are_no_news(endpoint: str) -> None:
    fields = {name: "anything" for name in NEEDLESS if "." not in name}
    assert ask(endpoint, **fields) == ask(endpoint)


@pytest.mark.parametrize(
    ("kind", "body", "unknown"),
    [
        (TokenizeRequest, {"prompt": "a", "zeta": 1, "user": "me"}, ("user", "zeta")),
        (DetokenizeRequest, {"tokens": [1], "alpha": 1}, ("alpha",)),
    ],
)
def test_unknown_fields_of_the_small_routes_are_told(
    kind: type[Struct], body: dict[str, object], unknown: tuple[str, ...]
) -> None:
    assert bodies.decode(json.dumps(body).encode(), kind)[1] == unknown


def test_every_path_of_vllms_is_served_or_says_why_not() -> None:
    served_here = served(documentation=True, development=False)
    paths = {operation.path.replace("{response_id}", "resp_1") for operation in served_here}
    assert {path for path in VLLM_PATHS - paths if not why_not_served(path)} == set()
    vectors = {operation.path for operation in served(documentation=True, development=False, pooling=True)}
    assert all(why_not_served(path) for path in vectors - paths)
    docs = {"/docs", "/redoc", "/openapi.json"}  # a flag takes them away
    assert {path for path in paths & vectors if why_not_served(path)} <= docs
    assert why_not_served("/v1/nothing") == ""
