"""Every field of the request bodies: what is taken, and what is refused by name, in OpenAI's error form."""

import json
import random
from operator import attrgetter
from typing import get_args, get_type_hints

import msgspec
import pytest
from parse_cases import CHATS, TAKEN
from parsing import ENDPOINTS, EOS, RESOLVED, SERVER, USER, ask, asked, body_of, refused
from refused_bodies import EVERY_BAD

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.openai import prompts
from meshlm.frontend.openai.parsed_request import AnswerOptions, MeshRequest, ParsedRequest
from meshlm.frontend.openai.responses import AnswerHead, WholeResponse
from meshlm.frontend.openai.schema import ChatRequest, Common, CompletionRequest, DetokenizeRequest, TokenizeRequest
from meshlm.frontend.requests.submits import build_each as build_submits
from meshlm.frontend.requests.submits import draws_of
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.edges.text import ChatPrompt, Prompt, TextPrompt
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import Handle


def half_of(found: ParsedRequest, path: str) -> MeshRequest | AnswerOptions | ParsedRequest:
    """The part of a request that has the first name of the path."""
    halves = (half for half in (found.mesh, found.answer, found) if path.split(".")[0] in half._fields)
    return next(halves)


@pytest.mark.parametrize(
    ("endpoint", "fields", "path", "expected"),
    [
        pytest.param(endpoint, fields, path, expected, id=f"{endpoint}-{json.dumps(fields)[:60]}-{path}")
        for where, fields, path, expected in TAKEN
        for endpoint in (ENDPOINTS if where == "both" else (where,))
    ],
)
def test_taken(endpoint: str, fields: dict[str, object], path: str, expected: object) -> None:
    got: object = half_of(ask(endpoint, **fields), path)
    for name in path.split("."):
        got = got[int(name)] if isinstance(got, tuple) and name.isdigit() else getattr(got, name)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(("fields", "expected"), CHATS, ids=lambda value: json.dumps(value, default=str)[:50])
def test_chat_prompt(fields: dict[str, object], expected: dict[str, object]) -> None:
    (prompt,) = ask("chat", **fields).mesh.prompts
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
        assert (silent.mesh.max_tokens, silent.mesh.cap_max_tokens) == (
            (16, False) if endpoint == "text" else (9, True)
        )
        assert msgspec.structs.asdict(silent.mesh.sampling).items() >= {**defaults, "max_tokens": 16}.items()
        said = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "max_tokens": 3}
        spoken = asked(endpoint, body_of(endpoint, {**said}), resolved)
        assert (spoken.mesh.max_tokens, spoken.mesh.cap_max_tokens) == (3, False)
        assert spoken.mesh.sampling == SamplingParams(temperature=0.0, eos_token_ids=EOS)


@pytest.mark.parametrize(
    ("endpoint", "fields", "limit", "expected"),
    [
        ("text", {}, 7, 7),
        ("text", {}, 70, 16),
        ("text", {"max_tokens": 30}, 20, 20),
        ("text", {"max_tokens": 30}, None, 30),
        ("chat", {}, 7, 7),
        ("chat", {}, None, 9),
        ("chat", {"max_tokens": 30}, 20, 20),
        ("chat", {"max_completion_tokens": 5}, 20, 5),
    ],
)
def test_a_generation_config_of_the_command_line_limits(
    endpoint: str, fields: dict[str, object], limit: int | None, expected: int
) -> None:
    """A model's own only gives what a chat gets that says nothing."""
    defaults = {"max_tokens": 9 if limit is None else limit}
    resolved = msgspec.structs.replace(RESOLVED, generation_defaults=defaults, max_output_tokens=limit)
    assert asked(endpoint, body_of(endpoint, fields), resolved).mesh.max_tokens == expected


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


def test_seeds_are_drawn_for_each_prompt_and_by_a_seed_the_same() -> None:
    def drawn(seed: int) -> list[int]:
        return seeds("text", draws=random.Random(seed), prompt=["a", "a"], n=2)

    first, second, third, fourth = drawn(1)
    assert (second, fourth) == (first + 1, third + 1)
    assert first != third
    assert drawn(1) == drawn(1) != drawn(2)


def test_a_servers_seed_makes_the_draws_of_each_http_process() -> None:
    def drawn(seed: int | None, index: int) -> list[int]:
        draws = draws_of(seed, index)
        return [draws.getrandbits(63) for _ in range(3)]

    assert drawn(0, 0) == drawn(0, 0)
    assert len({tuple(drawn(*of)) for of in [(0, 0), (0, 1), (1, 0), (None, 0), (None, 0)]}) == 5


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_seed_zero_is_a_seed(endpoint: str) -> None:
    assert seeds(endpoint, seed=0, n=2) == [0, 1]


def seeds(endpoint: str, draws: random.Random | None = None, **fields: object) -> list[int]:
    """The seed of each choice as it is sent."""
    asking = ask(endpoint, **fields)
    answer = WholeResponse(AnswerHead(asking, "id", 0, "tiny", lambda: None))
    handles = iter(range(1, 1000))
    list(build_submits(answer, asking, lambda: Handle(next(handles)), -1, draws=draws or random.SystemRandom()))
    return [choice.submit.sampling.seed for choice in answer.choices]


def server_with(**settings: object) -> ServerConfig:
    return msgspec.convert(settings, ServerConfig)


def test_what_the_server_says_of_every_request() -> None:
    body = body_of("chat", {"stream": True})
    server = server_with(return_tokens_as_token_ids=True, enable_force_include_usage=True)
    assert asked("chat", body, server=server).answer.tokens_as_ids
    assert asked("chat", body, server=server).answer.include_usage
    assert asked("chat", body, server=server).answer.continuous_usage
    assert not asked("chat", body_of("chat", {"return_tokens_as_token_ids": False}), server=server).answer.tokens_as_ids
    assert not ask("chat", stream=True).answer.include_usage


def test_the_servers_template_arguments_give_way_to_the_requests() -> None:
    server = server_with(default_chat_template_kwargs='{"enable_thinking": false, "x": 1}')
    (prompt,) = asked("chat", body_of("chat", {"chat_template_kwargs": {"x": 2}}), server=server).mesh.prompts
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
        found = asked(one, body_of(one, fields), server=server_with(max_logprobs=-1))
        assert attrgetter(path)(half_of(found, path)) == 1000


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


def tokenized(**fields: object) -> Prompt:
    request, unknown = bodies.decode(json.dumps(fields).encode(), TokenizeRequest)
    assert unknown == ()
    prompt, media = prompts.of_tokenize(request, SERVER, None)
    assert not media
    return prompt


def test_tokenize() -> None:
    assert tokenized(prompt="") == TextPrompt("")
    assert tokenized(prompt="a", add_special_tokens=False) == TextPrompt("a", False)
    assert tokenized(messages=[USER]) == ChatPrompt(msgspec.json.encode([USER]))
    assert tokenized(prompt="a", add_special_tokens=True) == TextPrompt("a", True)
    assert tokenized(messages=[USER], add_special_tokens=True) == ChatPrompt(
        msgspec.json.encode([USER]), add_special_tokens=True
    )
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
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [USER], "tools": [{"a": 1}]}, "tools"),
        ({"messages": [USER], "mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"messages": [USER], "add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
    ],
)
def test_tokenize_refuses(fields: dict[str, object], param: str) -> None:
    with pytest.raises(HttpError) as caught:
        tokenized(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("tokens", [None, "1", [-1], ["a"], [1.5], [1 << 31]])
def test_detokenize_refuses(tokens: object) -> None:
    with pytest.raises(HttpError) as caught:
        bodies.decode(json.dumps({"tokens": tokens}).encode(), DetokenizeRequest)
    assert (caught.value.status, caught.value.param) == (400, "tokens")
