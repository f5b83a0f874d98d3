"""No field of vLLM's or OpenAI's request bodies is ignored in silence: each is honoured, refused by name, or known to be needless."""

import json

import msgspec
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

from meshlm.frontend.http import bodies
from meshlm.frontend.http.answer_fields import ASKS_FOR_NOTHING, GROUPS, NEEDLESS, OF_ANSWER, OF_PROMPT
from meshlm.frontend.http.errors import NOT_SERVED, HttpError
from meshlm.frontend.messages.schema import MessagesRequest
from meshlm.frontend.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    StreamOptions,
    TokenizeRequest,
)
from meshlm.frontend.rendering.schema import BatchChatRequest, DerenderChatRequest
from meshlm.frontend.responses_api.schema import ResponsesRequest
from meshlm.frontend.routes.application import served

# Fields that change no answer on any path: who asks, for which model, in what order, for how long something is kept.
NAMES_AND_PLACES = {"model", "user", "user_profile_id", "workspace_id", "request_id", "priority", "cache_salt", "cache_control",
                    "num_speculative_tokens", "deterministic", "metadata", "store", "service_tier", "safety_identifier",
                    "prompt_cache_key", "diagnostics", "inference_geo", "file", "language", "to_language"}  # fmt: skip
# What is said in the words of one path alone, so that no other path's client says it.
OF_ONE_PATH = {"token_ids", "features", "assistant_tokens_mask", "token_offsets", "generate_response", "generate_responses",
               "prompt_tokens", "chat_request", "completion_request", "items", "label_token_ids", "apply_softmax", "item_first",
               "return_token_strs", "data", "queries", "text_1", "text_2", "data_1", "data_2", "texts", "response_format",
               "timestamp_granularities", "stream_include_usage", "stream_continuous_usage_stats"}  # fmt: skip
SERVED = {
    op.body
    for pooling, speech in ((False, False), (True, False), (False, True))
    for op in served(documentation=True, development=True, pooling=pooling, speech=speech)
    if isinstance(op.body, type)
}


def changes_of(kind: type[Struct]) -> tuple[str, ...]:
    found: tuple[str, ...] = getattr(kind, "changes", ())
    return found


CHANGED = sorted(filter(changes_of, SERVED), key=lambda kind: kind.__name__)
ASKING: dict[str, object] = {"verbosity": "low", "parallel_tool_calls": False, "truncate": 5, "modalities": ["audio"]}


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
    known = OF_PROMPT.keys() | OF_ANSWER.keys() | NEEDLESS.keys()
    left = names - set(kind.__struct_fields__)
    assert {f"{prefix}{name}" for name in left} - known == set()


def test_every_route_that_generates_says_what_changes_its_answers() -> None:
    assert {kind.__name__ for kind in SERVED if not changes_of(kind)} == {
        *("DetokenizeRequest", "ConversationRequest", "MetadataRequest", "ItemsRequest"),  # no answer of a model's
        *("Settings", "AbortRequest", "CollectiveRpcRequest", "ScaleRequest"),  # of operators
        *("InitRequest", "StartRequest", "UpdateRequest", "FinishRequest", "DiskUpdate", "NameRequest", "CheckRequest"),
    }
    assert {"ChatRequest", "MessagesRequest", "ResponsesRequest", "GenerateRequest", "EmbeddingRequest"} <= {
        kind.__name__ for kind in CHANGED
    }


def test_what_a_route_honours_the_table_has() -> None:
    """So that no other route ignores it."""
    table = {field for group in GROUPS.values() for field in group}
    for kind in CHANGED:
        assert set(kind.__struct_fields__) - table - NAMES_AND_PLACES - OF_ONE_PATH == set(), kind.__name__
    assert table & (NEEDLESS.keys() | NAMES_AND_PLACES) == set()
    assert ASKS_FOR_NOTHING.keys() <= table


def least(kind: type[Struct]) -> dict[str, object]:
    """A body that the type takes."""
    some = {"model": "tiny", "messages": [{}], "max_tokens": 1, "token_ids": [1], "sampling_params": {}, "query": "a", "items": ["a"],
            "label_token_ids": [1], "documents": ["a"], "generate_response": {"choices": []},
            "generate_responses": [{"choices": []}], "file": b"a"}  # fmt: skip
    found = {name: some[name] for name in kind.__struct_fields__ if name in some and name not in ("documents", "query")}
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    found |= {name: some[name] for name in required}
    if kind is BatchChatRequest:
        found["messages"] = [[{}]]
    return found


def not_taken(kind: type[Struct]) -> list[str]:
    """The fields that would change an answer of the route and are not its own."""
    found = {field for group in changes_of(kind) for field in GROUPS[group] if "." not in field}
    return sorted(found - set(kind.__struct_fields__))


@pytest.mark.parametrize("kind", CHANGED)
def test_what_would_change_the_answer_is_not_ignored(kind: type[Struct]) -> None:
    """Over all routes and all fields: one that the route does not take is refused by its name, and may be null."""
    assert len(not_taken(kind)) > 50
    for field in not_taken(kind):
        assert bodies.converted({**least(kind), field: None}, kind)[1] == ()
        with pytest.raises(HttpError) as caught:
            bodies.converted({**least(kind), field: ASKING.get(field, {"some": "object"})}, kind)
        assert (caught.value.status, caught.value.param) == (400, field)
        assert caught.value.message.startswith(f"{field}: ")
        assert len(caught.value.message) > len(field) + 10


@pytest.mark.parametrize("kind", CHANGED)
def test_other_servers_neutral_values_ask_for_nothing(kind: type[Struct]) -> None:
    for field in not_taken(kind):
        for value in ASKS_FOR_NOTHING.get(field, ({}, "", [], False, 0)):
            assert bodies.converted({**least(kind), field: value}, kind)[1] == (), (field, value)


@pytest.mark.parametrize(
    ("fields", "fine"),
    [
        ({"function_call": "none"}, True),
        ({"function_call": {"name": "f"}}, False),
        ({"web_search_options": {}}, False),
        ({"vllm_xargs": {"a": 1}}, False),
        ({"ec_transfer_params": {"a": 1}}, False),
        ({"logprob_token_ids": [1, 2]}, False),
        ({"repeat_penalty": 1.0, "typical_p": 1, "mirostat": 0, "min_keep": 0, "samplers": []}, True),
        ({"repeat_penalty": 1.1}, False),
        ({"format": "json"}, False),
        ({"thread": {"id": "msg_1"}}, False),
        ({"reasoning": {"effort": "high"}}, False),
        ({"extra_body": {"top_k": 5}}, False),
    ],
)
def test_values_that_ask_for_nothing(fields: dict[str, object], fine: bool) -> None:
    if fine:
        assert ask("chat", **fields) == ask("chat")
    else:
        assert refused("chat", fields)[1]["param"] == next(iter(fields))


def test_objects_within_a_body_are_looked_at_too() -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [], "output_config": {"effort": "low", "new": 1}}
    assert bodies.converted(body, MessagesRequest)[1] == ("output_config.new",)
    with pytest.raises(HttpError, match=r"output_config\.task_budget: not supported"):
        bodies.converted({**body, "output_config": {"task_budget": {"total": 5}}}, MessagesRequest)
    asked = {"generate_response": {"choices": []}, "chat_request": {"messages": [], "thread": "a"}}
    with pytest.raises(HttpError, match=r"chat_request\.thread: not supported"):
        bodies.converted(asked, DerenderChatRequest)


@pytest.mark.parametrize(
    ("kind", "field", "instead"),
    [
        (ResponsesRequest, "guided_json", "structured_outputs"),
        (ResponsesRequest, "response_format", "text.format"),
        (ResponsesRequest, "max_tokens", "max_output_tokens"),
        (MessagesRequest, "stop", "stop_sequences"),
        (MessagesRequest, "guided_json", "output_config.format"),
    ],
)
def test_a_refusal_says_the_name_of_the_path(kind: type[Struct], field: str, instead: str) -> None:
    with pytest.raises(HttpError, match=instead):
        bodies.converted({**least(kind), field: {"a": 1}}, kind)


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
    assert {path for path in VLLM_PATHS - paths if path not in NOT_SERVED} == set()
    vectors = {operation.path for operation in served(documentation=True, development=False, pooling=True)}
    assert all(path in NOT_SERVED for path in vectors - paths)
    docs = {"/docs", "/redoc", "/openapi.json"}  # a flag takes them away
    assert {path for path in paths & vectors if path in NOT_SERVED} <= docs
    assert "/v1/nothing" not in NOT_SERVED
