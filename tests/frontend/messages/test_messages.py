"""POST /v1/messages as Anthropic's own client reads it: texts, thinking, tool use, events, and how it ends."""

import json
from typing import Any

import anthropic
import httpx2
import msgspec
import pytest
from anthropic_client import CALL, OFF, TOOLS, USER, both
from scripted import NUM_CACHED, NUM_PROMPT, Scripted

from meshlm.frontend.messages.schema import MessagesResponse
from meshlm.protocol.edges.text import Finished
from meshlm.protocol.wire.ids import FinishReason


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
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(backend.app), base_url="http://localhost")
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
    assert backend.submits[-1].extras


async def test_an_answer_that_fits_a_schema(backend: Scripted, client: anthropic.AsyncAnthropic) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await both(client, output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "high"})
    assert backend.submits[-1].extras
    assert msgspec.json.decode(backend.prompt.template_kwargs_json)["reasoning_effort"] == "high"


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
