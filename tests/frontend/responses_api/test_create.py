"""POST /v1/responses as OpenAI's own client reads it: whole and streamed, with tools, reasoning and refusals."""

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pydantic
import pytest
from answering import HELLO, WORLD
from openai.types.responses import (
    FunctionToolParam,
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
    response_create_params,
)
from openai_client import CALL, OFF, SERVER, TOOLS, client_of
from request_fields import names
from scripted import NUM_CACHED, NUM_PROMPT, Scripted

from meshlm.frontend.responses_api.schema import ResponsesRequest, ResponsesResponse
from meshlm.frontend.schema import NEEDLESS, NOT_SUPPORTED
from meshlm.protocol.ids import ErrorKind, FinishReason
from meshlm.protocol.text_edge import Finished

Json = dict[str, Any]
TIMES = ("created_at", "completed_at")


@pytest.fixture
async def backend() -> Scripted:
    return Scripted(SERVER)


@pytest.fixture
async def client(backend: Scripted) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(backend) as found:
        yield found


async def both(client: openai.AsyncOpenAI, **fields: Any) -> Response:
    """The answer, which is the same whole, at a stream's end, and as the client puts a stream together."""
    asked: Any = {"model": "tiny", "input": "hi", "extra_body": {"request_id": "one"}, "store": False, **fields}
    whole: Response = await client.responses.create(**asked)
    events = [event async for event in await client.responses.create(**asked, stream=True)]
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert lasting(last.response) == lasting(whole)
    assert put_together(events) == lasting(whole)["output"]
    return whole


def lasting(response: Response) -> Json:
    found = response.to_dict(mode="json")
    return {name: value for name, value in found.items() if name not in TIMES}


def put_together(events: list[Any]) -> list[Json]:
    """The output, from the deltas alone, checked against what each event says is done."""
    items: list[Json] = []
    texts: list[str] = []
    for event in events:
        match event.type:
            case "response.output_item.added":
                assert event.output_index == len(items)
                items.append(event.item.to_dict(mode="json"))
                texts.append("")
            case "response.content_part.added":
                assert (event.item_id, event.content_index) == (items[-1]["id"], 0)
            case (
                "response.output_text.delta"
                | "response.reasoning_text.delta"
                | "response.function_call_arguments.delta"
            ):
                assert (event.item_id, event.output_index) == (items[-1]["id"], len(items) - 1)
                texts[-1] += event.delta
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event.text == texts[-1]
            case "response.function_call_arguments.done":
                assert event.arguments == texts[-1]
            case "response.content_part.done":
                assert event.part.text == texts[-1]
            case "response.output_item.done":
                assert event.item.id == items[-1]["id"]
                items[-1] = event.item.to_dict(mode="json")
    return items


def messages_of(backend: Scripted) -> list[Json]:
    found: list[Json] = msgspec.json.decode(backend.prompt.messages_json)
    return found


async def test_text(client: openai.AsyncOpenAI) -> None:
    answer = await both(client, reasoning=OFF)
    assert answer.output_text == "Hello you"
    (message,) = answer.output
    assert isinstance(message, ResponseOutputMessage)
    assert (message.role, message.status) == ("assistant", "completed")
    assert (answer.status, answer.id, answer.model, answer.error) == ("completed", "resp_one", "tiny", None)
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (NUM_PROMPT, 2, NUM_PROMPT + 2)
    assert usage.input_tokens_details.cached_tokens == NUM_CACHED
    assert (answer.to_dict()["store"], answer.tool_choice, answer.truncation) == (False, "none", "disabled")


async def test_reasoning_text_and_calls_are_items(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["<think>", "I look", ".", "</think>", "\n\n", "Look: ", CALL, "\n", CALL]
    answer = await both(client, tools=TOOLS)
    reasoning, message, *calls = answer.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["I look."]
    assert reasoning.encrypted_content is None
    assert isinstance(message, ResponseOutputMessage)
    assert answer.output_text == "\n\nLook: "
    for call in calls:
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Bärn"}, "completed")
    assert len({item.id for item in answer.output}) == 4
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == 3


async def test_text_that_comes_with_the_end_of_a_call(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    """Rows of several tokens: the call was being given out."""
    head, tail = CALL[:50], CALL[50:]
    backend.pieces = ["</think>", head, f"{tail} and so on {CALL}"]
    answer = await both(client, tools=TOOLS)
    call, message, other = answer.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert isinstance(other, ResponseFunctionToolCall)
    assert json.loads(call.arguments) == json.loads(other.arguments) == {"city": "Bärn"}
    assert isinstance(message, ResponseOutputMessage)
    assert answer.output_text == " and so on "


async def test_what_ends_by_its_length_is_incomplete(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.finished = Finished(0, FinishReason.LENGTH)
    answer = await both(client, max_output_tokens=2, reasoning=OFF)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert isinstance(answer.output[0], ResponseOutputMessage)
    assert answer.output[0].status == "incomplete"


async def test_the_clients_own_stream(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["a</think>", "Hello", " you"]
    async with client.responses.stream(model="tiny", input="hi", store=False) as stream:
        kinds = [event.type async for event in stream]
        assert (await stream.get_final_response()).output_text == "Hello you"
    item, part = "response.output_item", "response.content_part"
    thought, text = "response.reasoning_text", "response.output_text"
    assert kinds == [
        *("response.created", "response.in_progress"),
        *(f"{item}.added", f"{part}.added", f"{thought}.delta", f"{thought}.done", f"{part}.done", f"{item}.done"),
        *(f"{item}.added", f"{part}.added", f"{text}.delta", f"{text}.delta", f"{text}.done", f"{part}.done"),
        *(f"{item}.done", "response.completed"),
    ]


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
    extra = {"top_k": 3, "repetition_penalty": 1.5, "seed": 7, "stop": ["a"], "presence_penalty": 0.5, "min_tokens": 1}
    answer = await both(
        client,
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.25,
        metadata={"a": "b"},
        reasoning={"effort": "none", "summary": "auto"},
        text={"format": {"type": "text"}, "verbosity": "medium"},
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
    assert template == {"reasoning_effort": "none", "enable_thinking": False}
    assert backend.ignored_fields == ("min_tokens",) * 2, "it is a chat's alone, as in vLLM"
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


async def test_reasoning_may_be_left_out(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["hm</think>", "Hello"]
    answer = await both(client, extra_body={"request_id": "one", "include_reasoning": False})
    assert [item.type for item in answer.output] == ["message"]


async def test_log_probabilities_are_the_texts(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces, backend.logprobs = ["</think>", "Hé", " w"], [WORLD, HELLO, WORLD]
    answer = await both(client, include=["message.output_text.logprobs"], top_logprobs=2)
    message = answer.output[0]
    assert isinstance(message, ResponseOutputMessage)
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [(one.token, one.logprob, len(one.top_logprobs)) for one in part.logprobs[-2:]] == [
        ("Hé", -0.25, 2),
        (" w", -2.0, 2),
    ]
    assert backend.submits[-1].sampling.logprobs == 2


NAMESPACE: Json = {
    "type": "namespace",
    "name": "earth",
    "description": "d",
    "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}],
}


async def test_functions_of_a_namespace(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    """The model knows both names as one; the client has them apart, and sends them back so."""
    backend.pieces = ["hm</think>", CALL.replace('"weather"', '"earth__weather"')]
    asked: Any = [NAMESPACE, {"type": "function", "name": "time"}]
    answer = await both(client, tools=asked)
    (told, time) = (tool["function"] for tool in msgspec.json.decode(backend.prompt.tools_json))
    assert told == {"name": "earth__weather", "parameters": {"type": "object"}}
    assert time == {"name": "time"}
    call: Any = answer.output[-1].to_dict()
    assert (call["name"], call["namespace"]) == ("weather", "earth")
    assert answer.to_dict()["tools"] == asked
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    await both(client, tools=asked, input=[{"role": "user", "content": "hi"}, call, result])
    assert messages_of(backend)[1]["tool_calls"][0]["function"]["name"] == "earth__weather"
    for name in ("weather", "earth__weather"):
        await both(client, tools=asked, tool_choice={"type": "function", "name": name})
        assert backend.submits[-1].sampling.grammar is not None


async def test_tools_of_servers_may_be_there_where_none_is_called(
    backend: Scripted, client: openai.AsyncOpenAI
) -> None:
    asked: Any = [{"type": "web_search_preview"}, {"type": "code_interpreter", "container": "c"}, *TOOLS]
    await both(client, tools=asked, tool_choice="none")
    only: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    await both(client, tools=asked, tool_choice=only)
    assert [tool["function"]["name"] for tool in msgspec.json.decode(backend.prompt.tools_json)] == ["time"]
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]: tools of type 'web_search_preview'"):
        await client.responses.create(model="tiny", input="hi", tools=asked)


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


async def test_only_allowed_tools_are_told(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]}
    answer = await both(client, tools=TOOLS, tool_choice=choice)
    tools = msgspec.json.decode(backend.prompt.tools_json)
    assert [tool["function"]["name"] for tool in tools] == ["time"]
    assert len(answer.tools) == 2


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("required", '[{"name": "weather", "parameters": {"city": "Bärn"}}]'),
        ({"type": "function", "name": "weather"}, '{"city": "Bärn"}'),
    ],
)
async def test_a_call_that_is_forced(backend: Scripted, client: openai.AsyncOpenAI, choice: Any, text: str) -> None:
    backend.pieces = ["hm</think>", text[:20], text[20:]]
    answer = await both(client, tools=TOOLS, tool_choice=choice)
    call = answer.output[-1]
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bärn"})
    assert backend.submits[-1].sampling.grammar is not None
    assert answer.to_dict()["tool_choice"] == choice


class City(pydantic.BaseModel):
    name: str
    size: int


async def test_an_answer_that_fits_a_schema(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["hm</think>", '{"name": "Bern",', ' "size": 5}']
    answer = await client.responses.parse(model="tiny", input="hi", text_format=City, store=False)
    assert answer.output_parsed == City(name="Bern", size=5)
    assert backend.submits[-1].sampling.grammar is not None
    form: Any = answer.to_dict()["text"]
    assert (form["format"]["type"], form["format"]["name"]) == ("json_schema", "City")
    await both(client, text={"format": {"type": "json_object"}})
    assert backend.submits[-1].sampling.grammar is not None


async def test_what_the_model_reads_and_writes(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["hm", "</think>", "Yes", "."]
    answer = (await both(client, extra_body={"request_id": "one", "enable_response_messages": True})).to_dict()
    assert answer["input_messages"] == [
        {"type": "raw_message_tokens", "message": "the prompt", "tokens": list(range(NUM_PROMPT))}
    ]
    wrote = {"type": "raw_message_tokens", "message": "hm</think>Yes.", "tokens": [0, 1, 2, 3]}
    assert answer["output_messages"] == [wrote]
    hidden = {"request_id": "one", "enable_response_messages": True, "include_reasoning": False}
    assert (await both(client, extra_body=hidden)).to_dict()["output_messages"] == []
    plain = (await both(client)).to_dict()
    assert plain["input_messages"] is plain["output_messages"] is None


async def test_one_call_where_parallel_ones_are_not_wanted(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["</think>", CALL, CALL]
    answer = await both(client, tools=TOOLS, parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["function_call"]


BAD: list[tuple[Json, str]] = [
    ({"input": [{"type": "reasoning", "content": [], "summary": [[True], {}]}]}, "input[0].summary"),
    ({"input": [{"type": "reasoning", "content": [{"type": "text", "text": "a"}]}]}, "input[0].content"),
    ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [5]}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]."),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
    ({"input": [{"type": "function_call_output", "call_id": "", "output": "a"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "item_reference"}]}, "input[0]: items of type 'item_reference'"),
    ({"input": [{"type": "web_search_call"}]}, "input[0]: items of type 'web_search_call'"),
    ({"input": [{"type": "reasoning", "encrypted_content": "gAAA!"}]}, "input[0].encrypted_content"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"stop": ""}, "stop"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]: tools of type 'web_search'"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "rain"}}, "tool_choice: there is no tool 'rain'"),
    ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice: type 'file_search'"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice: allowed_tools"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "rain"}]}},
        "tool_choice: each",
    ),
    ({"tool_choice": "required"}, "tool_choice: 'required' needs tools"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format: "),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "structured_outputs: give"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 5}}}, "text.format"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"reasoning": {"effort": "very"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"include": ["everything"]}, "include"),
    ({"metadata": {str(place): "a" for place in range(17)}}, "metadata: at most 16"),
    ({"metadata": {"a": "b" * 513}}, "metadata: names"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"previous_input_messages": [{"role": "user"}]}, "previous_input_messages[0].content"),
    ({"previous_input_messages": [{"content": "a"}]}, "previous_input_messages[0].role"),
    (
        {"previous_input_messages": [{"role": "tool", "name": "functions.f", "content": "a"}]},
        "previous_input_messages[0]: no",
    ),
    (
        {"previous_input_messages": [{"role": "assistant", "recipient": "browser.search", "content": "{}"}]},
        "previous_input_messages[0]: calls of 'browser.search'",
    ),
    (
        {"previous_input_messages": [{"role": "user", "content": "a"}], "previous_response_id": "resp_1"},
        "previous_input_messages: give either",
    ),
    (
        {"previous_input_messages": [{"role": "user", "content": "a"}], "conversation": "conv_1"},
        "previous_input_messages: give either",
    ),
    ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
    (
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "c"}]}]},
        "tools[0].tools[0]: tools",
    ),
    ({"tools": [NAMESPACE, NAMESPACE]}, "tools: two functions"),
    (
        {"tools": [NAMESPACE, {**NAMESPACE, "name": "moon"}], "tool_choice": {"type": "function", "name": "weather"}},
        "tool_choice: 2 namespaces",
    ),
    ({"prompt": {"id": "p"}}, "prompt: prompt templates"),
    ({"context_management": [{"type": "compaction"}]}, "context_management: not supported"),
    ({"background": True, "store": False}, "background: "),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options needs"),
    ({"moderation": {"model": "m"}}, "moderation"),
]


@pytest.mark.parametrize(("fields", "text"), BAD)
async def test_what_is_wrong_is_named(client: openai.AsyncOpenAI, fields: Json, text: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.post("/responses", body={"model": "tiny", "input": "hi", **fields}, cast_to=object)
    body: Any = caught.value.body
    assert body["message"].startswith(text)
    assert body["param"] == text.split(":")[0].split("[")[0].split(".")[0].split(" ")[0] or "." in body["param"]


async def test_refusals_of_the_mesh_have_this_apis_names(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces, backend.failure = (), (ErrorKind.INVALID, "too long", "prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="tiny", input="hi", store=False)
    assert caught.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="other", input="hi")


async def test_a_body_that_is_compressed_is_named(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="content-encoding 'gzip'"):
        await client.responses.create(model="tiny", input="hi", extra_headers={"Content-Encoding": "gzip"})


async def test_a_stream_that_breaks_has_failed(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.failure = (ErrorKind.INTERNAL, "its worker died too often", "")
    events = [event async for event in await client.responses.create(model="tiny", input="hi", stream=True)]
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "its worker died too often")


async def test_a_retry_has_the_same_names(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["a</think>", CALL]
    headers = {"Idempotency-Key": "k"}
    asked: Any = {"model": "tiny", "input": "hi", "tools": TOOLS, "store": False, "extra_headers": headers}
    first, second = [await client.responses.create(**asked) for _ in range(2)]
    assert lasting(first) == lasting(second)
    with pytest.raises(openai.BadRequestError, match="Last-Event-ID"):
        await client.responses.create(**asked | {"extra_headers": {**headers, "Last-Event-ID": "3"}})


async def test_answers_are_as_declared(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["a</think>", "b", CALL]
    answer = await client.responses.with_raw_response.create(model="tiny", input="hi", tools=TOOLS, store=False)
    sent = msgspec.json.decode(answer.text)
    assert msgspec.to_builtins(msgspec.json.decode(answer.text, type=ResponsesResponse)) == sent


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
    assert all_names - NEEDLESS.keys() - NOT_SUPPORTED.keys() - set(ResponsesRequest.__struct_fields__) == set()
    assert set(FunctionToolParam.__annotations__) >= {"name", "parameters", "strict", "type", "description"}
