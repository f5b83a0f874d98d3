"""Every field of the request bodies: what is taken, and what is refused by name, in OpenAI's error form."""

import json
from operator import attrgetter
from typing import get_args, get_type_hints

import msgspec
import pytest
from parsing import ENDPOINTS, EOS, RESOLVED, SERVER, USER, ask, asked, body_of, refused

from meshlm.frontend import parse, prompts
from meshlm.frontend.answers import WholeAnswer
from meshlm.frontend.errors import HttpError
from meshlm.frontend.schema import (
    NOT_SUPPORTED,
    STRUCTURED,
    ChatRequest,
    Common,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from meshlm.frontend.submits import build as build_submits
from meshlm.protocol.columns import pack_i32
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.ids import Handle
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.text_edge import ChatPrompt, TextPrompt, TokenPrompt

# --- what is taken ---

TAKEN: list[tuple[str, dict[str, object], str, object]] = [
    ("both", {}, "sampling.max_tokens", 16),
    ("both", {"model": "tiny"}, "unknown_fields", ()),
    ("both", {"user": "me"}, "unknown_fields", ()),
    ("both", {"stream": True}, "stream", True),
    ("both", {"stream": True, "stream_options": {}}, "include_usage", False),
    ("both", {"stream": True, "stream_options": {"include_usage": True}}, "include_usage", True),
    ("both", {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage", True),
    ("both", {"n": 1}, "num_choices", 1),
    ("both", {"n": 128}, "num_returned", 128),
    ("both", {"max_tokens": 1}, "max_tokens", 1),
    ("both", {"max_tokens": 1 << 30}, "max_tokens", 1 << 30),
    ("both", {"min_tokens": 0}, "sampling.min_tokens", 0),
    ("both", {"min_tokens": 5}, "sampling.min_tokens", 5),
    ("both", {"temperature": 0}, "sampling.temperature", 0.0),
    ("both", {"temperature": 1.5}, "sampling.temperature", 1.5),
    ("both", {"temperature": 100}, "sampling.temperature", 100.0),
    ("both", {"top_p": 0.25}, "sampling.top_p", 0.25),
    ("both", {"top_p": 1}, "sampling.top_p", 1.0),
    ("both", {"top_k": -1}, "sampling.top_k", 0),
    ("both", {"top_k": 0}, "sampling.top_k", 0),
    ("both", {"top_k": 50}, "sampling.top_k", 50),
    ("both", {"min_p": 0}, "sampling.min_p", 0.0),
    ("both", {"min_p": 1.0}, "sampling.min_p", 1.0),
    ("both", {"presence_penalty": -2}, "sampling.presence_penalty", -2.0),
    ("both", {"frequency_penalty": 2.0}, "sampling.frequency_penalty", 2.0),
    ("both", {"repetition_penalty": 1.1}, "sampling.repetition_penalty", 1.1),
    ("both", {"logit_bias": {}}, "sampling.logit_bias", {}),
    ("both", {"logit_bias": {"0": -100, "999": 1.5}}, "sampling.logit_bias", {0: -100.0, 999: 1.5}),
    ("both", {"logit_bias": {"5": 101, "6": -1e9}}, "sampling.logit_bias", {5: 100.0, 6: -100.0}),
    ("both", {}, "seed", None),
    ("both", {"seed": 0}, "seed", 0),
    ("both", {"seed": 7}, "seed", 7),
    ("both", {"seed": (1 << 63) - 1}, "seed", (1 << 63) - 1),
    ("both", {"seed": -1}, "seed", (1 << 63) - 1),
    ("both", {"stop": "END"}, "text.stop", ("END",)),
    ("both", {"stop": ["a", "ü\n"]}, "text.stop", ("a", "ü\n")),
    ("both", {"stop": []}, "text.stop", ()),
    ("both", {"stop": [str(number) for number in range(64)]}, "text.stop", tuple(str(n) for n in range(64))),
    ("both", {"stop": "x" * 4096}, "text.stop", ("x" * 4096,)),
    ("both", {"stop_token_ids": [0, 999]}, "sampling.stop_token_ids", (0, 999)),
    ("both", {"include_stop_str_in_output": True}, "text.include_stop_str_in_output", True),
    ("both", {"ignore_eos": False}, "sampling.eos_token_ids", EOS),
    ("both", {"ignore_eos": True}, "sampling.eos_token_ids", ()),
    ("both", {"skip_special_tokens": False}, "text.skip_special_tokens", False),
    ("both", {"spaces_between_special_tokens": False}, "text.spaces_between_special_tokens", False),
    ("both", {"allowed_token_ids": [3, 4]}, "sampling.allowed_token_ids", (3, 4)),
    ("both", {"truncate_prompt_tokens": 5}, "text.truncate_prompt_tokens", 5),
    ("both", {"prompt_logprobs": 0}, "prompt_logprobs", 0),
    ("both", {"prompt_logprobs": 20}, "sampling.prompt_logprobs", 20),
    ("both", {"priority": -(1 << 31)}, "priority", -(1 << 31)),
    ("both", {"cache_salt": "tenant"}, "cache_salt", "tenant"),
    ("both", {"return_token_ids": True}, "return_token_ids", True),
    ("both", {"timeout": 0.5}, "timeout_s", 0.5),
    ("both", {"zeta": 1, "alpha": None}, "unknown_fields", ("alpha", "zeta")),
    ("both", {"truncate_prompt_tokens": -1, "max_tokens": 4}, "text.truncate_prompt_tokens", 60),
    ("both", {"request_id": "mine"}, "request_id", "mine"),
    ("both", {"return_tokens_as_token_ids": True}, "tokens_as_ids", True),
    ("both", {"response_format": {"type": "text"}}, "unknown_fields", ()),
    ("text", {}, "is_chat", False),
    ("text", {}, "max_tokens", 16),
    ("text", {"prompt": "Grüße\u0000"}, "prompts", [TextPrompt("Grüße\u0000", True)]),
    ("text", {"add_special_tokens": False}, "prompts", [TextPrompt("hi", False)]),
    ("text", {"prompt": [1, 999]}, "prompts", [TokenPrompt(pack_i32([1, 999]))]),
    ("text", {"prompt": ["a", "b"]}, "prompts", [TextPrompt("a"), TextPrompt("b")]),
    ("text", {"prompt": [[1], [2, 3]]}, "prompts", [TokenPrompt(pack_i32([1])), TokenPrompt(pack_i32([2, 3]))]),
    ("text", {"prompt": ["a", [1]]}, "prompts", [TextPrompt("a"), TokenPrompt(pack_i32([1]))]),
    ("text", {"best_of": 3}, "num_choices", 3),
    ("text", {"best_of": 3}, "num_returned", 1),
    ("text", {"best_of": 3}, "sampling.logprobs", 0),  # the choice needs them
    ("text", {"best_of": 3}, "logprobs", -1),
    ("text", {"best_of": 3, "logprobs": 2}, "sampling.logprobs", 2),
    ("text", {"best_of": 3, "logprobs": 2}, "logprobs", 2),
    ("text", {"best_of": 2, "n": 2, "stream": True}, "num_choices", 2),
    ("text", {"echo": True}, "echo", True),
    ("text", {"echo": True}, "prompt_logprobs", -1),
    ("text", {"echo": True, "logprobs": 2}, "prompt_logprobs", 2),
    ("text", {"echo": True, "logprobs": 2, "prompt_logprobs": 1}, "prompt_logprobs", 1),
    ("text", {"echo": True, "logprobs": 2, "stream": True}, "prompt_logprobs", 2),
    ("text", {"prompt": ["a"] * 2048, "n": 2}, "num_choices", 2),
    ("text", {}, "logprobs", -1),
    ("text", {"logprobs": 0}, "logprobs", 0),
    ("text", {"logprobs": 20}, "sampling.logprobs", 20),
    ("text", {"suffix": ""}, "prompts", [TextPrompt("hi")]),
    ("text", {"max_tokens": 0, "echo": True}, "max_tokens", 1),
    ("text", {"max_tokens": 0, "echo": True}, "prompt_only", True),
    ("chat", {"tools": [{"type": "function"}], "tool_choice": "none"}, "is_chat", True),
    ("chat", {"modalities": ["text"]}, "unknown_fields", ()),
    ("chat", {"parallel_tool_calls": False}, "parallel_tool_calls", False),
    ("chat", {"parallel_tool_calls": None}, "parallel_tool_calls", True),
    ("chat", {"include_reasoning": False}, "include_reasoning", False),
    ("chat", {"echo": True}, "begins_with", ""),
    ("chat", {"echo": True, "messages": [USER, {"role": "assistant", "content": "So"}]}, "begins_with", "So"),
    ("chat", {}, "is_chat", True),
    ("chat", {}, "max_tokens", None),  # whatever the context leaves
    ("chat", {"max_completion_tokens": 3, "max_tokens": 9}, "max_tokens", 3),
    ("chat", {"logprobs": False}, "logprobs", -1),
    ("chat", {"logprobs": True}, "logprobs", 0),
    ("chat", {"logprobs": True, "top_logprobs": 20}, "sampling.logprobs", 20),
    ("chat", {"top_logprobs": 0}, "logprobs", -1),
    ("chat", {"tool_choice": "auto"}, "is_chat", True),
    ("chat", {"tool_choice": "none"}, "is_chat", True),
    ("chat", {"tool_choice": None, "tools": None}, "is_chat", True),
    ("chat", {}, "echo", False),
]


@pytest.mark.parametrize(
    ("endpoint", "fields", "path", "expected"),
    [
        pytest.param(endpoint, fields, path, expected, id=f"{endpoint}-{json.dumps(fields)[:60]}-{path}")
        for where, fields, path, expected in TAKEN
        for endpoint in (ENDPOINTS if where == "both" else (where,))
    ],
)
def test_taken(endpoint: str, fields: dict[str, object], path: str, expected: object) -> None:
    got: object = attrgetter(path)(ask(endpoint, **fields))
    assert got == expected
    assert type(got) is type(expected)


CHATS: list[tuple[dict[str, object], dict[str, object]]] = [
    ({}, {"messages_json": b'[{"role":"user","content":"hi"}]'}),
    ({"messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}, USER]}, {}),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, {}),
    ({"messages": [{"role": "nobody", "content": "hi"}]}, {}),  # the template knows which roles there are
    ({"tools": []}, {"tools_json": b""}),
    ({"chat_template": "{{ x }}"}, {"chat_template": "{{ x }}"}),
    ({"chat_template_kwargs": {"x": 1}}, {"template_kwargs_json": b'{"x":1}'}),
    ({"reasoning_effort": "low"}, {"template_kwargs_json": b'{"reasoning_effort":"low"}'}),
    ({"documents": [{"a": "b"}]}, {"template_kwargs_json": b'{"documents":[{"a":"b"}]}'}),
    (
        {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
        {"template_kwargs_json": b'{"reasoning_effort":"high"}'},
    ),
    ({"tools": [{"a": 1}], "tool_choice": "none"}, {"tools_json": b'[{"a":1}]'}),
    ({"messages": [{"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]}]}, {}),
    ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
    ({"continue_final_message": True}, {"add_generation_prompt": False, "continue_final_message": True}),
    ({"add_special_tokens": True}, {"add_special_tokens": True}),
]


@pytest.mark.parametrize(("fields", "expected"), CHATS, ids=lambda value: json.dumps(value, default=str)[:50])
def test_chat_prompt(fields: dict[str, object], expected: dict[str, object]) -> None:
    (prompt,) = ask("chat", **fields).prompts
    assert isinstance(prompt, ChatPrompt)
    plain = ChatPrompt(msgspec.json.encode(fields.get("messages", [USER])))
    assert prompt == msgspec.structs.replace(plain, **expected)


def test_the_models_defaults_stand_where_the_client_says_nothing() -> None:
    defaults: dict[str, float | int] = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "max_tokens": 9,
    }
    resolved = msgspec.structs.replace(RESOLVED, generation_defaults=defaults)
    for endpoint in ENDPOINTS:
        silent = asked(endpoint, body_of(endpoint, {}), resolved)
        assert silent.max_tokens == 9
        assert msgspec.structs.asdict(silent.sampling).items() >= {**defaults, "max_tokens": 16}.items()
        said = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "max_tokens": 3}
        spoken = asked(endpoint, body_of(endpoint, {**said}), resolved)
        assert spoken.max_tokens == 3
        assert spoken.sampling == SamplingParams(temperature=0.0, eos_token_ids=EOS)


def nullable(kind: type[Common], name: str) -> bool:
    return type(None) in get_args(get_type_hints(kind)[name])


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_null_is_as_good_as_absent(endpoint: str) -> None:
    kind: type[Common] = CompletionRequest if endpoint == "text" else ChatRequest
    nulls = [name for name in kind.__struct_fields__ if nullable(kind, name)]
    assert {"n", "stop", "logprobs", "max_tokens", "stream_options", "logit_bias"} <= set(nulls)
    assert ask(endpoint, **dict.fromkeys(nulls)) == ask(endpoint)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_seed_of_a_client_makes_equal_draws(endpoint: str) -> None:
    assert seeds(endpoint, seed=3, n=3) == seeds(endpoint, seed=3, n=3) == [3, 4, 5]
    assert seeds(endpoint) != seeds(endpoint)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_seed_zero_is_a_seed(endpoint: str) -> None:
    assert seeds(endpoint, seed=0, n=2) == [0, 1]


def seeds(endpoint: str, **fields: object) -> list[int]:
    """The seed of each choice as it is sent."""
    asking = ask(endpoint, **fields)
    answer = WholeAnswer(asking, "id", 0, "tiny", lambda: None)
    handles = iter(range(1, 1000))
    build_submits(answer, asking, lambda: Handle(next(handles)), -1)
    return [choice.submit.sampling.seed for choice in answer.choices]


def server_with(**settings: object) -> ServerConfig:
    return msgspec.convert(settings, ServerConfig)


def test_what_the_server_says_of_every_request() -> None:
    body = body_of("chat", {"stream": True})
    server = server_with(return_tokens_as_token_ids=True, enable_force_include_usage=True)
    assert asked("chat", body, server=server).tokens_as_ids
    assert asked("chat", body, server=server).include_usage
    assert not asked("chat", body_of("chat", {"return_tokens_as_token_ids": False}), server=server).tokens_as_ids
    assert not ask("chat", stream=True).include_usage


def test_the_servers_template_arguments_give_way_to_the_requests() -> None:
    server = server_with(default_chat_template_kwargs='{"enable_thinking": false, "x": 1}')
    (prompt,) = asked("chat", body_of("chat", {"chat_template_kwargs": {"x": 2}}), server=server).prompts
    assert isinstance(prompt, ChatPrompt)
    assert msgspec.json.decode(prompt.template_kwargs_json) == {"enable_thinking": False, "x": 2}


def test_a_template_of_the_request_needs_the_servers_trust() -> None:
    with pytest.raises(HttpError, match="--trust-request-chat-template") as caught:
        asked("chat", body_of("chat", {"chat_template": "x"}), server=ServerConfig())
    assert (caught.value.status, caught.value.param) == (400, "chat_template")


@pytest.mark.parametrize(
    ("endpoint", "fields", "path"),
    [
        ("text", {"logprobs": 1000}, "sampling.logprobs"),
        ("both", {"prompt_logprobs": -1}, "sampling.prompt_logprobs"),
        ("chat", {"logprobs": True, "top_logprobs": -1}, "sampling.logprobs"),
    ],
)
def test_logprobs_of_the_whole_vocabulary(endpoint: str, fields: dict[str, object], path: str) -> None:
    for one in ENDPOINTS if endpoint == "both" else (endpoint,):
        assert attrgetter(path)(asked(one, body_of(one, fields), server=server_with(max_logprobs=-1))) == 1000


# --- what is refused ---

HUGE = 1 << 70
BAD: list[tuple[str, dict[str, list[object]]]] = [
    (
        "both",
        {
            "model": [3, ["tiny"], True],
            "stream": [1, "true", {}],
            "n": [0, -1, 129, HUGE, 1.5, "2", True, [1]],
            "max_tokens": [0, -1, (1 << 30) + 1, HUGE, 2.5, "16", True],
            "min_tokens": [-1, HUGE, "1", 0.5],
            "temperature": [-0.1, 100.5, 1e300, "1", True, [1.0]],
            "top_p": [0, -0.5, 1.0001, 2, "1", True],
            "top_k": [-2, HUGE, 1.5, "5"],
            "min_p": [-0.1, 1.1, "0"],
            "presence_penalty": [-2.1, 2.1, "0", {}],
            "frequency_penalty": [-2.1, 2.1, "0", {}],
            "repetition_penalty": [0, -1, 100.1, "1"],
            "logit_bias": [
                [],
                "5",
                {"5": "x"},
                {"5": None},
                {"token": 1},
                {"-1": 1},
                {"1.0": 1},
                {"": 1},
                {"1000": 1},
                {str(HUGE): 1},
                {"9" * 5000: 1},
                {"²": 1},
                {"٣": 1},
            ],
            "seed": [1 << 63, -(1 << 63) - 1, HUGE, 1.5, "1"],
            "stop": [3, {}, [3], [None], "", [""], ["a", ""], ["a"] * 65, ["a"] * 10_000, "x" * 4097, ["x" * 100_000]],
            "response_format": [
                "json",
                [],
                {},
                {"type": "json_object"},
                {"type": "json_schema"},
                {"type": "json_schema", "json_schema": {"name": "any", "schema": {}}},
                {"type": None},
            ],
            "stop_token_ids": [3, "3", ["a"], [-1], [1000], [HUGE], [1.5], [True], [None]],
            "include_stop_str_in_output": [None, 1, "yes"],
            "ignore_eos": [None, 1, "yes"],
            "skip_special_tokens": [None, 0, "no"],
            "spaces_between_special_tokens": [None, 0, "no"],
            "allowed_token_ids": [3, ["a"], [-1], [1000], [HUGE]],
            "truncate_prompt_tokens": [0, -2, HUGE, "5"],
            "prompt_logprobs": [-1, -2, 21, HUGE, "1", True],
            "priority": [None, 1 << 31, -(1 << 31) - 1, HUGE, 0.5, "high"],
            "cache_salt": [1, ["a"]],
            "request_id": [1, {}, "", "two words", "ü", "a\r\nb: c", "a\n", "x" * 129],
            "return_token_ids": [1, "yes"],
            "return_tokens_as_token_ids": [1, "yes"],
            "timeout": [0, -1, "5", True],
            "user": [1, {}],
            "add_special_tokens": [1, "yes"],
        },
    ),
    (
        "text",
        {
            "prompt": [
                None,
                "",
                [],
                [[]],
                [""],
                ["a", ""],
                [[1], []],
                3,
                1.5,
                True,
                {},
                {"text": "a"},
                [1, "a"],
                [1, None],
                [1.5],
                [True],
                [[True]],
                [["a"]],
                [[[1]]],
                [None],
                [-1],
                [1000],
                [HUGE],
                [[1], [-1]],
                ["a"] * 2049,
            ],
            "best_of": [0, -1, 129, "2", 1.5],
            "echo": [1, "yes"],
            "logprobs": [-1, 21, HUGE, True, "1", 0.5],
            "suffix": ["end", 3],
        },
    ),
    (
        "chat",
        {
            "messages": [
                None,
                "hi",
                {},
                [],
                ["hi"],
                [None],
                [[]],
                [{}],
                [{"content": "no role"}],
                [{"role": None, "content": "a"}],
                [{"role": 3, "content": "a"}],
                [{"role": "", "content": "a"}],
                [{"role": "user", "content": 3}],
                [{"role": "user", "content": {"text": "a"}}],
                [{"role": "user", "content": [3]}],
                [{"role": "user", "content": [{"type": "refusal", "text": "a"}]}],
                [{"role": "user", "content": [{"type": "text"}]}],
                [{"role": "user", "content": [{"type": "text", "text": 3}]}],
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
                [USER, {"role": "user", "content": 3}],
            ],
            "max_completion_tokens": [0, -1, HUGE, "16"],
            "logprobs": [1, 0, "true"],
            "top_logprobs": [-1, -2, 5, "1", True],  # 5: without logprobs
            "tools": [{}, "tool", ["tool"], [None], [{"type": "function"}]],
            "tool_choice": [3, "sometimes", {"type": "function"}, "required", True, []],
            "chat_template": [3, {}],
            "documents": ["a", ["a"], {}],
            "echo": [None, 1, "yes"],
            "modalities": ["text", ["audio"], ["text", "audio"], [3]],
            "reasoning_effort": [3, {}],
            "include_reasoning": [None, 1, "yes"],
            "parallel_tool_calls": [1, "yes"],
            "chat_template_kwargs": ["a", [], 3],
            "add_generation_prompt": [None, 1, "yes"],
            "continue_final_message": [None, 1, "yes"],
        },
    ),
]
BAD_TOGETHER: list[tuple[str, dict[str, object], str]] = [
    ("both", {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ("both", {"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
    ("text", {"stream": True, "prompt_logprobs": 1, "echo": True, "logprobs": 1}, "prompt_logprobs"),
    ("text", {"prompt": ["a"] * 33, "n": 128}, "n"),
    ("text", {"prompt": ["a"] * 33, "best_of": 128}, "n"),
    ("chat", {"tool_choice": "auto", "tools": [{"type": "function"}]}, "tools"),
    ("both", {"stream_options": {}}, "stream_options"),
    ("both", {"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
    ("both", {"stream_options": [], "stream": True}, "stream_options"),
    ("both", {"stream_options": "usage", "stream": True}, "stream_options"),
    ("both", {"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
    (
        "both",
        {"stream_options": {"continuous_usage_stats": None}, "stream": True},
        "stream_options.continuous_usage_stats",
    ),
    ("text", {"n": 3, "best_of": 2}, "best_of"),
    ("text", {"n": 1, "best_of": 2, "stream": True}, "best_of"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat", {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
]
EVERY_BAD = [
    *((where, {field: value}, field) for where, fields in BAD for field, values in fields.items() for value in values),
    *BAD_TOGETHER,
]


@pytest.mark.parametrize(
    ("endpoint", "fields", "param"),
    [
        pytest.param(endpoint, fields, param, id=f"{endpoint}-{json.dumps(fields)[:60]}")
        for where, fields, param in EVERY_BAD
        for endpoint in (ENDPOINTS if where == "both" else (where,))
    ],
)
def test_refused_by_name(endpoint: str, fields: dict[str, object], param: str) -> None:
    raised, error = refused(endpoint, fields)
    assert raised.status == 400
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["code"] == 400
    assert set(error) == {"message", "type", "param", "code"}
    message = error["message"]
    assert isinstance(message, str)
    assert param in message
    assert len(message) < 300


@pytest.mark.parametrize(("endpoint", "kind"), [("text", CompletionRequest), ("chat", ChatRequest)])
def test_no_field_is_forgotten_here(endpoint: str, kind: type[Common]) -> None:
    fields = set(kind.__struct_fields__)
    bad = {param.partition(".")[0] for where, _, param in EVERY_BAD if where in ("both", endpoint)}
    taken = {name for where, found, _, _ in TAKEN if where in ("both", endpoint) for name in found}
    taken |= {name for found, _ in CHATS for name in found} if endpoint == "chat" else set()
    assert fields - bad == set()
    assert fields - taken == set()


@pytest.mark.parametrize(("endpoint", "field"), [("text", "prompt"), ("chat", "messages")])
def test_required(endpoint: str, field: str) -> None:
    with pytest.raises(HttpError) as caught:
        asked(endpoint, b"{}")
    assert (caught.value.status, caught.value.param) == (400, field)


# --- /tokenize, /detokenize ---


@pytest.mark.parametrize("endpoint", ["text", "chat"])
@pytest.mark.parametrize("field", NOT_SUPPORTED)
def test_what_would_change_the_answer_is_not_ignored(endpoint: str, field: str) -> None:
    assert ask(endpoint, **{field: None}).unknown_fields == (field,)
    raised, error = refused(endpoint, {field: {"type": "object"}})
    assert (raised.status, error["param"]) == (400, field)
    assert "supported" in str(error["message"])


@pytest.mark.parametrize("endpoint", ["text", "chat"])
@pytest.mark.parametrize("field", STRUCTURED)
@pytest.mark.parametrize("value", [{}, "", [], False])
def test_an_empty_schema_asks_for_json_and_is_not_ignored(endpoint: str, field: str, value: object) -> None:
    raised, error = refused(endpoint, {field: value})
    assert (raised.status, error["param"]) == (400, field)


@pytest.mark.parametrize("value", [{}, "", [], False])
def test_an_empty_value_of_another_field_asks_for_nothing(value: object) -> None:
    for field in NOT_SUPPORTED.keys() - set(STRUCTURED):
        assert ask("chat", **{field: value}).unknown_fields == (field,)


def tokenized(**fields: object) -> TextPrompt | TokenPrompt | ChatPrompt:
    request, unknown = parse.decode(json.dumps(fields).encode(), TokenizeRequest)
    assert unknown == ()
    return prompts.of_tokenize(request, SERVER)


def test_tokenize() -> None:
    assert tokenized(prompt="") == TextPrompt("")
    assert tokenized(prompt="a", add_special_tokens=False) == TextPrompt("a", False)
    assert tokenized(messages=[USER]) == ChatPrompt(msgspec.json.encode([USER]))
    assert tokenized(messages=[USER], add_generation_prompt=False) == ChatPrompt(
        msgspec.json.encode([USER]), add_generation_prompt=False
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [USER]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"prompt": "a", "add_special_tokens": None}, "add_special_tokens"),
    ],
)
def test_tokenize_refuses(fields: dict[str, object], param: str) -> None:
    with pytest.raises(HttpError) as caught:
        tokenized(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("tokens", [None, "1", [-1], ["a"], [1.5], [1 << 31]])
def test_detokenize_refuses(tokens: object) -> None:
    with pytest.raises(HttpError) as caught:
        parse.decode(json.dumps({"tokens": tokens}).encode(), DetokenizeRequest)
    assert (caught.value.status, caught.value.param) == (400, "tokens")
