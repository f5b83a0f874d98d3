"""What POST /v1/messages is given becomes the messages and the parameters of a chat."""

from typing import Any

import anthropic
import msgspec
import pytest
from anthropic_client import OFF, TOOLS, USER, both, messages_of
from parsing import RESOLVED
from scripted import Scripted

from meshlm.frontend.messages.schema import CountTokensRequest, MessagesRequest

Json = dict[str, Any]


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
        ({"type": "thinking_turns", "value": 2.0}, [None, "b", "c"]),
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


# The fields of vLLM 0.26's bodies, and of the client's.
VLLM = {"model", "messages", "max_tokens", "metadata", "output_config", "stop_sequences", "stream", "system"}
VLLM |= {"temperature", "tool_choice", "tools", "top_k", "top_p", "kv_transfer_params", "ec_transfer_params"}
VLLM |= {"chat_template_kwargs"}


async def test_no_field_of_the_clients_is_ignored_in_silence(backend: Scripted) -> None:
    from anthropic.types import message_count_tokens_params, message_create_params

    from meshlm.frontend.http.answer_fields import NEEDLESS, OF_ANSWER, OF_PROMPT

    known = NEEDLESS.keys() | OF_ANSWER.keys() | OF_PROMPT.keys()
    names = VLLM | set(message_create_params.MessageCreateParamsStreaming.__annotations__)
    assert names - known - set(MessagesRequest.__struct_fields__) == set()
    counted = set(message_count_tokens_params.MessageCountTokensParams.__annotations__)
    assert counted - known - set(CountTokensRequest.__struct_fields__) == set()
    assert RESOLVED.served_names == ("tiny",)
