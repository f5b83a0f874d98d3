"""What POST /v1/responses is given becomes the messages and the parameters of a chat."""

from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import (
    FunctionToolParam,
    ResponseFunctionToolCall,
    ResponseReasoningItem,
    response_create_params,
)
from openai_client import CALL, TOOLS, messages_of
from request_fields import names
from scripted import Scripted
from whole_and_streamed import both

from meshlm.frontend.http.answer_fields import NEEDLESS, OF_ANSWER, OF_PROMPT
from meshlm.frontend.responses_api.schema import ResponsesRequest

Json = dict[str, Any]


async def test_items_become_a_chats_messages(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    """Also those of an answer, sent back as they came."""
    backend.pieces = ["I look.</think>", "Look: ", CALL, CALL]
    first = await both(client, tools=TOOLS)
    calls = [item for item in first.output if isinstance(item, ResponseFunctionToolCall)]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": calls[0].call_id, "output": "rain"},
        {
            "type": "function_call_output",
            "call_id": calls[1].call_id,
            "output": [{"type": "input_text", "text": "sun"}, {"type": "input_text", "text": "wind"}],
        },
        {"role": "user", "content": [{"type": "input_text", "text": "so"}, {"type": "input_text", "text": "?"}]},
    ]
    start: list[Any] = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    await both(client, input=[*start, *first.to_dict()["output"], *results], instructions="Be brief.", tools=TOOLS)  # type: ignore[misc]
    function = {"name": "weather", "arguments": '{"city": "Bärn"}'}
    asked = [{"id": call.call_id, "type": "function", "function": function} for call in calls]
    assert messages_of(backend) == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "reasoning": "I look.", "content": "Look: ", "tool_calls": asked},
        {"role": "tool", "tool_call_id": calls[0].call_id, "content": "rain"},
        {"role": "tool", "tool_call_id": calls[1].call_id, "content": "sun\nwind"},
        {"role": "user", "content": [{"type": "text", "text": "so"}, {"type": "text", "text": "?"}]},
    ]
    tools = msgspec.json.decode(backend.prompt.tools_json)
    assert tools == [
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}, "strict": False}},
        {"type": "function", "function": {"name": "time"}},
    ]


async def test_turns_stay_apart(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    said: list[Any] = [{"role": "assistant", "content": text} for text in ("a", "b")]
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    reasoning = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "hm"}]}
    await both(client, input=[*said, call, reasoning, call, {"role": "user", "content": "hi"}])
    asked = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert messages_of(backend) == [
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": asked},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": asked},
        {"role": "user", "content": "hi"},
    ]


async def test_a_message_that_is_not_complete_is_gone_on_with(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    begun: Any = {"type": "message", "role": "assistant", "content": "The best is (", "status": "incomplete"}
    await both(client, input=[{"role": "user", "content": "hi"}, begun])
    assert backend.prompt.continue_final_message
    await both(client, input=[{"role": "user", "content": "hi"}, {**begun, "status": "completed"}])
    assert not backend.prompt.continue_final_message


async def test_parameters_arrive_and_come_back(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    extra = {"top_k": 3, "repetition_penalty": 1.5, "seed": 7, "stop": ["a"], "presence_penalty": 0.5, "zeta": 1}
    answer = await both(
        client,
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.25,
        metadata={"a": "b"},
        reasoning={"effort": "none", "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "low"},
        truncation="auto",
        user="me",
        service_tier="auto",
        parallel_tool_calls=False,
        prompt_cache_key="k",
        safety_identifier="s",
        max_tool_calls=3,
        extra_body={"request_id": "one", **extra},
    )
    submit = backend.submits[-1]
    sampling = submit.sampling
    assert (submit.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (7, 0.5, 3, 0.25)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.seed) == (1.5, 0.5, 7)
    assert submit.text.stop == ("a",)
    assert submit.text.truncate_prompt_tokens > 0
    template = msgspec.json.decode(backend.prompt.template_kwargs_json)
    assert template == {"reasoning_effort": "none", "enable_thinking": False, "verbosity": "low"}
    assert backend.ignored_fields == ("zeta",) * 2
    found = answer.to_dict()
    assert {name: found[name] for name in ("metadata", "user", "truncation", "max_output_tokens", "temperature")} == {
        "metadata": {"a": "b"},
        "user": "me",
        "truncation": "auto",
        "max_output_tokens": 7,
        "temperature": 0.5,
    }


async def test_reasoning_may_travel_with_the_client(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["hm</think>", "Hello"]
    first = await both(client, include=["reasoning.encrypted_content"])
    reasoning = first.output[0]
    assert isinstance(reasoning, ResponseReasoningItem)
    assert reasoning.encrypted_content
    item: Any = {"type": "reasoning", "summary": [], "encrypted_content": reasoning.encrypted_content}
    await both(client, input=[item, {"role": "user", "content": "hi"}])
    assert messages_of(backend)[0] == {"role": "assistant", "content": "", "reasoning": "hm"}


# One conversation in both forms of `previous_input_messages`.
IN_CHAT: list[Json] = [
    {"role": "system", "content": "Old."},
    {"role": "user", "content": [{"type": "text", "text": "rain"}, {"type": "text", "text": "?"}]},
    {
        "role": "assistant",
        "reasoning": "hm",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "name": "f", "content": "yes"},
    {"role": "assistant", "content": "It rains."},
]
IN_HARMONY: list[Json] = [
    {"author": {"role": "developer"}, "content": "Old."},
    {"author": {"role": "user"}, "content": [{"type": "text", "text": "rain?"}]},
    {"role": "assistant", "channel": "analysis", "content": [{"type": "text", "text": "hm"}]},
    {"author": {"role": "assistant"}, "channel": "commentary", "recipient": "functions.f", "content": "{}"},
    {
        "author": {"role": "tool", "name": "functions.f"},
        "channel": "commentary",
        "recipient": "assistant",
        "content": "yes",
    },
    {"author": {"role": "assistant"}, "channel": "final", "content": "It rains."},
]


@pytest.mark.parametrize("messages", [IN_CHAT, IN_HARMONY], ids=["chat", "harmony"])
async def test_earlier_messages_of_the_client(
    backend: Scripted, client: openai.AsyncOpenAI, messages: list[Json]
) -> None:
    extra = {"request_id": "one", "previous_input_messages": messages}
    await both(client, input="And now?", instructions="Be kind.", extra_body=extra)
    found = messages_of(backend)
    call_id = found[3]["tool_call_id"]
    assert found == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "rain?"},
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": "yes"},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "And now?"},
    ]
    await both(client, input="", extra_body=extra)
    assert messages_of(backend)[-1] == {"role": "assistant", "content": "It rains."}


# The fields of vLLM 0.26's body that OpenAI's client does not have.
VLLM = names(
    """
    logit_bias include_reasoning top_k skip_special_tokens include_stop_str_in_output presence_penalty frequency_penalty request_id
    media_io_kwargs mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages structured_outputs
    repetition_penalty seed stop ignore_eos vllm_xargs kv_transfer_params ec_transfer_params chat_template_kwargs
    """
)


def test_no_field_of_the_clients_is_ignored_in_silence() -> None:
    all_names = VLLM | set(response_create_params.ResponseCreateParamsStreaming.__annotations__)
    assert (
        all_names - NEEDLESS.keys() - OF_ANSWER.keys() - OF_PROMPT.keys() - set(ResponsesRequest.__struct_fields__)
        == set()
    )
    assert set(FunctionToolParam.__annotations__) >= {"name", "parameters", "strict", "type", "description"}
