"""POST /v1/responses as OpenAI's own client reads it, whole and streamed: texts, reasoning, calls, and how it ends."""

import json
from typing import Any

import msgspec
import openai
import pydantic
import pytest
from answering import HELLO, WORLD
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem
from openai_client import CALL, OFF, TOOLS
from scripted import NUM_CACHED, NUM_PROMPT, Scripted
from whole_and_streamed import both, lasting

from meshlm.frontend.responses_api.schema import ResponsesResponse
from meshlm.protocol.edges.text import Finished
from meshlm.protocol.wire.ids import FinishReason


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


class City(pydantic.BaseModel):
    name: str
    size: int


async def test_an_answer_that_fits_a_schema(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["hm</think>", '{"name": "Bern",', ' "size": 5}']
    answer = await client.responses.parse(model="tiny", input="hi", text_format=City, store=False)
    assert answer.output_parsed == City(name="Bern", size=5)
    assert backend.submits[-1].extras
    form: Any = answer.to_dict()["text"]
    assert (form["format"]["type"], form["format"]["name"]) == ("json_schema", "City")
    await both(client, text={"format": {"type": "json_object"}})
    assert backend.submits[-1].extras


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
