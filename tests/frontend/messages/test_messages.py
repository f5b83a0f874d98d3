"""POST /v1/messages as Anthropic's own client reads it: whole and streamed, with tools, thinking and refusals."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import msgspec
import pytest
from anthropic.types import Message
from parsing import RESOLVED
from scripted import NUM_CACHED, NUM_PROMPT, Scripted

from meshlm.frontend.messages.schema import CountTokensRequest, MessagesRequest, MessagesResponse
from meshlm.protocol.config import ServerConfig
from meshlm.protocol.ids import ErrorKind, FinishReason
from meshlm.protocol.text_edge import Finished

USER: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {"name": "weather", "description": "of a city", "input_schema": {"properties": {"city": {"type": "string"}}}},
    {"name": "time", "input_schema": {"type": "object"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bärn"}}\n</tool_call>'
SERVER = ServerConfig(enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3")
OFF: Any = {"type": "disabled"}
Json = dict[str, Any]


def client_of(backend: Scripted, **settings: Any) -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(backend.app))
    return anthropic.AsyncAnthropic(
        **{"base_url": "http://x", "api_key": "none", "max_retries": 0, "http_client": http, **settings}
    )


@pytest.fixture
async def backend() -> Scripted:
    return Scripted(SERVER)


@pytest.fixture
async def client(backend: Scripted) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(backend) as found:
        yield found


async def both(client: anthropic.AsyncAnthropic, **fields: Any) -> Message:
    """The answer, which is the same whole and as the client puts a stream together."""
    asked: Any = {
        "model": "tiny",
        "max_tokens": 20,
        "messages": USER,
        "extra_headers": {"X-Request-Id": "one"},
        **fields,
    }
    whole: Message = await client.messages.create(**asked)
    async with client.messages.stream(**asked) as stream:
        streamed = await stream.get_final_message()
    first, second = (json.loads(one.to_json()) for one in (whole, streamed))
    for one in (first, second):
        for block in one["content"]:
            block.pop("parsed_output", None)  # the client's own
    assert first == second
    return whole


def messages_of(backend: Scripted) -> list[Json]:
    found: list[Json] = msgspec.json.decode(backend.prompt.messages_json)
    return found


async def test_text(client: anthropic.AsyncAnthropic) -> None:
    answer = await both(client, thinking=OFF)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Hello you"}]
    assert (answer.stop_reason, answer.stop_sequence, answer.model) == ("end_turn", None, "tiny")
    assert answer.id.startswith("msg_")
    assert answer._request_id == "one"
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (NUM_PROMPT - NUM_CACHED, NUM_CACHED)
    assert usage.output_tokens == 2


@pytest.mark.parametrize(
    ("finished", "reason", "text"),
    [
        (Finished(0, FinishReason.LENGTH), "max_tokens", None),
        (Finished(0, FinishReason.STOP, "END"), "stop_sequence", "END"),
        (Finished(0, FinishReason.STOP, 7), "end_turn", None),
    ],
)
async def test_why_it_ended(
    backend: Scripted, client: anthropic.AsyncAnthropic, finished: Finished, reason: str, text: str | None
) -> None:
    backend.finished = finished
    answer = await both(client, stop_sequences=["END"])
    assert (answer.stop_reason, answer.stop_sequence) == (reason, text)


async def test_thinking_text_and_calls_are_blocks(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    backend.pieces = ["<think>", "I look", ".", "</think>", "\n\n", "Look: ", CALL, "\n", CALL, "\n"]
    answer = await both(client, tools=TOOLS, thinking={"type": "adaptive"})
    thinking, text, *calls = answer.content
    assert isinstance(thinking, anthropic.types.ThinkingBlock)
    assert thinking.thinking == "I look."
    assert thinking.signature
    assert isinstance(text, anthropic.types.TextBlock)
    assert text.text == "\n\nLook: "
    assert [(call.type, getattr(call, "name", ""), getattr(call, "input", {})) for call in calls] == [
        ("tool_use", "weather", {"city": "Bärn"})
    ] * 2
    assert len({getattr(call, "id", "") for call in calls}) == 2
    assert answer.stop_reason == "tool_use"


@pytest.mark.parametrize("pieces", [[], [" "], ["\n", "\n"]])
async def test_an_answer_of_nothing_is_an_empty_text(
    backend: Scripted, client: anthropic.AsyncAnthropic, pieces: list[str]
) -> None:
    backend.pieces = pieces
    answer = await both(client, thinking=OFF)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "".join(pieces)}]


async def test_events_come_in_anthropics_order(backend: Scripted) -> None:
    backend.pieces = ["a</think>", "b", CALL]
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(backend.app), base_url="http://x")
    body = {"model": "tiny", "max_tokens": 5, "messages": USER, "stream": True, "tools": TOOLS}
    answer = await http.post("/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found = json.loads(data.removeprefix("data: "))
        assert name == f"event: {found['type']}"
        events.append((found["type"], found.get("index"), found.get("delta", {}).get("type")))
    block = "content_block"
    assert events == [
        ("message_start", None, None),
        ("ping", None, None),
        (f"{block}_start", 0, None),
        (f"{block}_delta", 0, "thinking_delta"),
        (f"{block}_delta", 0, "signature_delta"),
        (f"{block}_stop", 0, None),
        (f"{block}_start", 1, None),
        (f"{block}_delta", 1, "text_delta"),
        (f"{block}_stop", 1, None),
        (f"{block}_start", 2, None),
        (f"{block}_delta", 2, "input_json_delta"),
        (f"{block}_stop", 2, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]


async def test_a_conversation_becomes_a_chats(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    use: Json = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Bärn"}}
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                use,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "c2", "content": "no", "is_error": True},
                {"type": "tool_result", "tool_use_id": "c3"},
                {"type": "text", "text": "and?"},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    system: Any = [
        {"type": "text", "text": "x-anthropic-billing-header: 1"},
        {"type": "text", "text": "Be kind."},
        {"type": "text", "text": " Be brief."},
    ]
    await both(client, messages=turns, system=system, tools=TOOLS, tool_choice={"type": "auto"})
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bärn"}'}}
    assert messages_of(backend) == [
        {"role": "system", "content": "Be kind. Be brief."},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "and?"}, {"type": "text", "text": "so?"}]},
    ]
    tools = msgspec.json.decode(backend.prompt.tools_json)
    assert [tool["function"]["name"] for tool in tools] == ["weather", "time"]
    assert tools[0]["function"]["parameters"] == {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ("all", ["a", "b", "c"]),  # as Claude Code has it
        ({"type": "thinking_turns", "value": 2}, [None, "b", "c"]),
        ({"type": "thinking_turns", "value": 9}, ["a", "b", "c"]),
        (None, [None, None, "c"]),
    ],
)
async def test_reasoning_of_earlier_turns_may_be_cleared(
    backend: Scripted, client: anthropic.AsyncAnthropic, keep: object, left: list[str | None]
) -> None:
    turns: list[Any] = []
    for thought in "abc":
        said = [{"type": "thinking", "thinking": thought, "signature": ""}, {"type": "text", "text": "so"}]
        turns += [{"role": "assistant", "content": said}, *USER]
    edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
    await both(client, messages=turns, extra_body={"context_management": {"edits": [edit]}})
    assert [message.get("reasoning") for message in messages_of(backend) if message["role"] == "assistant"] == left


async def test_tools_that_were_searched_for(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    """A tool that is deferred says so to the template, and so does a result that names some."""
    found = [{"type": "text", "text": "these"}, {"type": "tool_reference", "tool_name": "weather"}]
    turns: Any = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": found}]}]
    tools: Any = [{**TOOLS[0], "defer_loading": True}, *TOOLS[1:]]
    await both(client, messages=turns, tools=tools)
    assert messages_of(backend) == [
        {"role": "tool", "tool_call_id": "c1", "content": "these"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "tool_reference", "name": "weather"}]},
    ]
    told = msgspec.json.decode(backend.prompt.tools_json)
    assert [tool["function"].get("defer_loading") for tool in told] == [True, *[None] * (len(tools) - 1)]


async def test_an_assistants_last_message_is_gone_on_with(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    await both(client, messages=[*USER, {"role": "assistant", "content": "The best is ("}])
    assert backend.prompt.continue_final_message
    assert not backend.prompt.add_generation_prompt


async def test_parameters_arrive(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    await both(
        client,
        max_tokens=7,
        extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.25},
        stop_sequences=["a", "b"],
        metadata={"user_id": "me"},
        service_tier="auto",
        thinking=OFF,
        system="Be kind.",
    )
    submit = backend.submits[-1]
    sampling = submit.sampling
    assert (submit.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (7, 0.5, 3, 0.25)
    assert submit.text.stop == ("a", "b")
    assert msgspec.json.decode(backend.prompt.template_kwargs_json) == {"enable_thinking": False, "thinking": False}
    assert messages_of(backend)[0] == {"role": "system", "content": "Be kind."}
    assert backend.ignored_fields == ()


async def test_thinking_that_is_omitted_is_not_shown(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    backend.pieces = ["a</think>", "b"]
    answer = await both(client, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "b"}]


async def test_one_call_where_parallel_ones_are_disabled(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    backend.pieces = ["</think>", CALL, CALL]
    answer = await both(client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block.type for block in answer.content] == ["tool_use"]


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"type": "any"}, '[{"name": "weather", "parameters": {"city": "Bärn"}}]'),
        ({"type": "tool", "name": "weather"}, '{"city": "Bärn"}'),
    ],
)
async def test_a_call_that_is_forced(
    backend: Scripted, client: anthropic.AsyncAnthropic, choice: Any, text: str
) -> None:
    backend.pieces = ["hm</think>", text[:20], text[20:]]
    answer = await both(client, tools=TOOLS, tool_choice=choice)
    assert getattr(answer.content[-1], "input") == {"city": "Bärn"}  # noqa: B009
    assert answer.stop_reason == "tool_use"
    assert backend.submits[-1].sampling.grammar is not None


async def test_an_answer_that_fits_a_schema(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await both(client, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "high"})
    assert backend.submits[-1].sampling.grammar is not None
    assert msgspec.json.decode(backend.prompt.template_kwargs_json)["reasoning_effort"] == "high"


async def test_tokens_are_counted(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    found = await client.messages.count_tokens(model="tiny", messages=USER, system="Be kind.", tools=TOOLS)
    await client.messages.create(model="tiny", messages=USER, system="Be kind.", tools=TOOLS, max_tokens=1)
    assert found.input_tokens == len(backend.prompt.messages_json), "the prompt is the same"


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}]])
async def test_a_system_message_without_a_text_stands_alone(
    backend: Scripted, client: anthropic.AsyncAnthropic, content: Any
) -> None:
    only: Any = [{"role": "system", "content": content}]
    assert (await client.messages.count_tokens(model="tiny", messages=only)).input_tokens
    await client.messages.create(model="tiny", messages=only, max_tokens=1)
    assert messages_of(backend) == [{"role": "system", "content": ""}]


BAD: list[tuple[Json, str]] = [
    ({"messages": []}, "messages: give at least one"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
    ({"messages": [*USER, {"role": "user", "content": 5}]}, "messages.1.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0: blocks of"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content.0"),
    ({"messages": [*USER, {"role": "user", "content": []}]}, "messages.1.content: give at least one block"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "is_error": 0.5}]}]},
        "messages.0.content.0.is_error",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": 1}]}]},
        "messages.0.content.0.content",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": []}]}]},
        "messages.0.content.0.input",
    ),
    ({"messages": [{"role": "assistant", "content": [{"type": "server_tool_use"}]}]}, "messages.0.content.0: blocks"),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences: each"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
    ({"tools": [{"name": "", "input_schema": {}}]}, "tools.0.name"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0: tools of type 'web_search"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "rain"}}, "tool_choice.name: there is no tool 'rain'"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: 'any' needs tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice"),
    ({"thinking": {"type": "perhaps"}}, "thinking"),
    ({"mcp_servers": [{"name": "a"}]}, "mcp_servers: not supported"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format"),
    ({"container": "c"}, "container: not supported"),
    ({"context_management": {"edits": [{}]}}, "context_management.edits.0: edits of type 'None'"),
    (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management.edits.0: edits of type 'clear_tool",
    ),
    (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "some"}]}},
        "context_management.edits.0.keep",
    ),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
]


@pytest.mark.parametrize(("fields", "text"), BAD)
async def test_what_is_wrong_is_named(client: anthropic.AsyncAnthropic, fields: Json, text: str) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 20, "messages": USER}
    with pytest.raises(anthropic.BadRequestError) as caught:
        await client.post("/v1/messages", body={**asked, **fields}, cast_to=object)
    body: Any = caught.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(text)


async def test_thinking_needs_a_parser() -> None:
    """A server that cannot tell reasoning from an answer refuses what asks for it, and takes what leaves it to the model."""
    backend = Scripted()
    async with client_of(backend) as client:
        enabled: Any = {"type": "enabled", "budget_tokens": 1024}
        with pytest.raises(anthropic.BadRequestError, match="--reasoning-parser"):
            await client.messages.create(model="tiny", messages=USER, max_tokens=9, thinking=enabled)
        await client.messages.create(model="tiny", messages=USER, max_tokens=9, thinking={"type": "adaptive"})


async def test_errors_have_anthropics_form(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(model="other", messages=USER, max_tokens=9)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError):
        await client.get("/v1/messages/batches", cast_to=object)
    with pytest.raises(anthropic.APIStatusError) as method:
        await client.get("/v1/messages", cast_to=object)
    body: Any = method.value.body
    assert (method.value.status_code, body["type"]) == (405, "error")
    backend.pieces, backend.failure = (), (ErrorKind.OVERLOADED, "full", "")
    with pytest.raises(anthropic.InternalServerError) as full:
        await client.messages.create(model="tiny", messages=USER, max_tokens=9)
    assert (full.value.status_code, full.value.type) == (503, "overloaded_error")


async def test_a_stream_that_breaks_says_so(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    backend.failure = (ErrorKind.INTERNAL, "its worker died too often", "")
    with pytest.raises(anthropic.APIStatusError, match="died too often"):
        async with client.messages.stream(model="tiny", messages=USER, max_tokens=9) as stream:
            await stream.get_final_message()


@pytest.mark.parametrize("how", [{"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}])
async def test_either_header_has_the_key(how: Any) -> None:
    backend = Scripted(ServerConfig(api_key=("other", "secret")))
    async with client_of(backend, **how) as client:
        assert (await client.messages.create(model="tiny", messages=USER, max_tokens=9)).content
    async with client_of(backend, api_key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(model="tiny", messages=USER, max_tokens=9)
    assert caught.value.type == "authentication_error"


async def test_a_retry_has_the_same_names(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    backend.pieces = ["a</think>", CALL]
    asked: Any = {"model": "tiny", "max_tokens": 9, "messages": USER, "tools": TOOLS}
    headers = {"Idempotency-Key": "k"}
    first, second = [await client.messages.create(**asked, extra_headers=headers) for _ in range(2)]
    assert first == second
    assert backend.submits[0].retry == backend.submits[1].retry is not None
    with pytest.raises(anthropic.BadRequestError, match="Last-Event-ID"):
        await client.messages.create(**asked, extra_headers={**headers, "Last-Event-ID": "3"})


async def test_answers_are_as_declared(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    backend.pieces = ["a</think>", "b", CALL]
    answer = await client.messages.with_raw_response.create(model="tiny", max_tokens=9, messages=USER, tools=TOOLS)
    sent = json.loads(await answer.text())
    assert msgspec.to_builtins(msgspec.json.decode(await answer.text(), type=MessagesResponse)) == sent


# The fields of vLLM 0.26's bodies, and of the client's.
VLLM = {"model", "messages", "max_tokens", "metadata", "output_config", "stop_sequences", "stream", "system"}
VLLM |= {"temperature", "tool_choice", "tools", "top_k", "top_p", "kv_transfer_params", "ec_transfer_params"}
VLLM |= {"chat_template_kwargs"}


async def test_no_field_of_the_clients_is_ignored_in_silence(backend: Scripted) -> None:
    from anthropic.types import message_count_tokens_params, message_create_params

    from meshlm.frontend.schema import NEEDLESS, NOT_SUPPORTED

    known = NEEDLESS.keys() | NOT_SUPPORTED.keys()
    names = VLLM | set(message_create_params.MessageCreateParamsStreaming.__annotations__)
    assert names - known - set(MessagesRequest.__struct_fields__) == set()
    counted = set(message_count_tokens_params.MessageCountTokensParams.__annotations__)
    assert counted - known - set(CountTokensRequest.__struct_fields__) == set()
    assert RESOLVED.served_names == ("tiny",)
