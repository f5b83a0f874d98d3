"""POST /v1/responses/compact through OpenAI's own client: a conversation becomes the user's messages and a summary that goes on."""

from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import CompactedResponse, ResponseCompactionItem
from openai_client import CALL, TOOLS, Frontend, client_of, messages_of
from scripted import NUM_CACHED, NUM_PROMPT, Scripted

from meshlm.frontend.responses_api.input_routes import MAX_SUMMARY_TOKENS, SUMMARIZE
from meshlm.protocol.edges.text import Finished
from meshlm.protocol.wire.ids import ErrorKind, FinishReason

Json = dict[str, Any]
TALK: list[Any] = [
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello Ada."},
    {"role": "user", "content": [{"type": "input_text", "text": "I like"}, {"type": "input_text", "text": "rain."}]},
]


def compaction_of(found: CompactedResponse) -> ResponseCompactionItem:
    item = found.output[-1]
    assert isinstance(item, ResponseCompactionItem)
    return item


async def test_the_users_messages_and_a_summary_come_back(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["hm</think>", " Ada likes", " rain. "]
    found = await client.responses.compact(model="tiny", input=TALK, instructions="Be brief.")
    assert (found.object, found.id[:5]) == ("response.compaction", "resp_")
    assert [item.type for item in found.output] == ["message", "message", "compaction"]
    texts = [[part["text"] for part in item["content"]] for item in found.to_dict(warnings=False)["output"][:2]]  # type: ignore[index]
    assert texts == [["My name is Ada."], ["I like", "rain."]]
    assert len({item.id for item in found.output}) == 3
    assert (backend.submits[-1].max_tokens, backend.submits[-1].cap_max_tokens) == (MAX_SUMMARY_TOKENS, True)
    assert (found.usage.input_tokens, found.usage.input_tokens_details.cached_tokens) == (NUM_PROMPT, NUM_CACHED)
    assert (found.usage.output_tokens, found.usage.output_tokens_details.reasoning_tokens) == (3, 1)
    assert messages_of(backend) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "My name is Ada."},
        {"role": "assistant", "content": "Hello Ada."},
        {"role": "user", "content": f"I like\nrain.\n\n{SUMMARIZE}"},
    ]


async def test_the_conversation_goes_on_from_the_summary(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["</think>", "Ada likes rain."]
    found = await client.responses.compact(model="tiny", input=TALK)
    assert "Ada" not in compaction_of(found).encrypted_content
    kept: list[Any] = found.to_dict(warnings=False)["output"]  # type: ignore[assignment]
    after: list[Any] = [*kept, {"role": "user", "content": "What do I like?"}]
    await client.responses.create(model="tiny", input=after)
    assert messages_of(backend) == [
        {"role": "user", "content": "My name is Ada.\n\nI like\nrain."},
        {"role": "assistant", "content": "Ada likes rain."},
        {"role": "user", "content": "What do I like?"},
    ]
    again = await client.responses.compact(model="tiny", input=after)
    assert [item.type for item in again.output] == ["message", "message", "message", "compaction"]
    counted = await client.responses.input_tokens.count(model="tiny", input=after)
    assert counted.input_tokens == len(backend.questions[-1].prompt.messages_json)  # type: ignore[union-attr]


async def test_calls_and_their_results_are_summed_up(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["</think>", "Look: ", CALL]
    first = await client.responses.create(model="tiny", input="Weather?", tools=TOOLS)
    call: Any = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    backend.pieces = ["</think>", "It rains."]
    given: list[Any] = [{"role": "user", "content": "Weather?"}, *first.to_dict()["output"], result]  # type: ignore[misc]
    found = await client.responses.compact(model="tiny", input=given)
    assert [item.type for item in found.output] == ["message", "compaction"]
    asked = messages_of(backend)
    assert [message["role"] for message in asked] == ["user", "assistant", "tool", "user"]
    assert asked[-1] == {"role": "user", "content": SUMMARIZE}


async def test_stored_responses_are_compacted_by_their_id(frontends: Frontend) -> None:
    backend, other = frontends(), frontends()
    async with client_of(backend) as client, client_of(other) as elsewhere:
        first = await client.responses.create(model="tiny", input="My name is Ada.")
        other.pieces = ["</think>", "Ada is here."]
        found = await elsewhere.responses.compact(model="tiny", previous_response_id=first.id)
        assert [item.type for item in found.output] == ["message", "compaction"]
        assert [message["role"] for message in messages_of(other)] == ["user", "assistant", "user"]
        kept: list[Any] = found.to_dict(warnings=False)["output"]  # type: ignore[assignment]
        last = await client.responses.create(model="tiny", input=kept)  # any frontend reads it, and stores it
        listed = await client.responses.input_items.list(last.id)
        assert {item.type for item in listed.data} == {"message", "compaction"}
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(found.id)  # itself it is not stored


@pytest.mark.parametrize(
    ("fields", "status", "begin"),
    [
        ({}, 400, "input: give a text or a list of items"),
        ({"input": [5]}, 400, "input[0]"),
        ({"input": [{"type": "compaction"}]}, 400, "input[0].encrypted_content: must be a string"),
        (
            {"input": [{"type": "compaction", "encrypted_content": "gAAA!"}]},
            400,
            "input[0].encrypted_content: was not made",
        ),
        ({"input": "a", "model": "huge"}, 404, "The model `huge` does not exist"),
        ({"input": "a", "previous_response_id": "resp_1"}, 404, "previous_response_id: there is no response"),
        ({"input": "a", "extra_body": {"temperature": 0.5}}, 400, "temperature: not supported on this path"),
        ({"input": "a", "extra_body": {"tools": TOOLS}}, 400, "tools: not supported on this path"),
    ],
    ids=str,
)
async def test_bad_input_is_named(client: openai.AsyncOpenAI, fields: Json, status: int, begin: str) -> None:
    asked: Any = {"model": "tiny", **fields}
    with pytest.raises(openai.APIStatusError) as told:
        await client.responses.compact(**asked)
    body: Any = told.value.body
    assert (told.value.status_code, body["message"][: len(begin)]) == (status, begin)


async def test_cache_settings_change_nothing(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["</think>", "So."]
    await client.responses.compact(
        model="tiny", input="a", prompt_cache_key="k", prompt_cache_retention="24h", service_tier="auto"
    )
    assert backend.ignored_fields == ()


async def test_a_model_that_writes_no_summary_is_an_error(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["I think and think"]
    backend.finished = Finished(0, FinishReason.LENGTH)
    with pytest.raises(openai.InternalServerError, match="the model has written no summary"):
        await client.responses.compact(model="tiny", input=TALK)


async def test_what_the_mesh_refuses_is_told_in_this_apis_words(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.failure = (ErrorKind.INVALID, "prompt: 9000 tokens are too many", "prompt")
    with pytest.raises(openai.BadRequestError, match="input: 9000 tokens are too many"):
        await client.responses.compact(model="tiny", input=TALK)


async def test_asked_again_by_its_key_the_answer_is_the_same(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    backend.pieces = ["</think>", "So."]
    asked: Any = {"model": "tiny", "input": "a", "extra_headers": {"Idempotency-Key": "one"}}
    first, second = [await client.responses.compact(**asked) for _ in range(2)]
    assert msgspec.json.encode(first.to_dict(warnings=False)["output"]) == msgspec.json.encode(
        second.to_dict(warnings=False)["output"]
    )
