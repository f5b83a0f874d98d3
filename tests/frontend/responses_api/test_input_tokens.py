"""POST /v1/responses/input_tokens through OpenAI's own client: the tokens of the prompt that a response would have."""

from typing import Any

import openai
import pytest
from openai_client import NAMESPACE, TOOLS, Frontend, client_of, messages_of
from scripted import Scripted

from meshlm.protocol.edges.text import ChatPrompt, Tokenize, TokenizeReply
from meshlm.protocol.wire.ids import ErrorKind

Json = dict[str, Any]


def counted(backend: Scripted) -> ChatPrompt:
    """The prompt that the tokenizer was asked for last."""
    prompt = backend.questions[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "hi"},
        {"input": [{"role": "user", "content": "hi"}], "instructions": "Be brief."},
        {"input": "hi", "tools": TOOLS, "tool_choice": "auto"},
        {"input": "hi", "tools": [NAMESPACE], "parallel_tool_calls": False},
        {
            "input": "hi",
            "reasoning": {"effort": "none"},
            "text": {"verbosity": "low", "format": {"type": "json_object"}},
        },
    ],
    ids=["text", "instructions", "tools", "namespace", "settings"],
)
async def test_the_prompt_is_the_one_of_the_response(
    backend: Scripted, client: openai.AsyncOpenAI, fields: Any
) -> None:
    found = await client.responses.input_tokens.count(model="tiny", **fields)
    assert (found.object, found.input_tokens) == ("response.input_tokens", len(counted(backend).messages_json))
    await client.responses.create(model="tiny", **fields)
    assert counted(backend) == backend.prompt
    assert len(backend.submits) == 1, "to count computes nothing"


async def test_a_conversation_counts_from_its_beginning(frontends: Frontend) -> None:
    backend = frontends()
    async with client_of(backend) as client:
        first = await client.responses.create(model="tiny", input="hi", instructions="Be brief.")
        again: Any = {"model": "tiny", "previous_response_id": first.id}
        found = await client.responses.input_tokens.count(**again, input="so?")
        await client.responses.create(**again, input="so?")
        assert counted(backend) == backend.prompt
        assert [message["role"] for message in messages_of(backend)] == ["user", "assistant", "user"]
        alone = await client.responses.input_tokens.count(**again)
        assert 0 < alone.input_tokens < found.input_tokens, "the conversation is counted without more input too"
        kept = await client.conversations.create(items=[{"type": "message", "role": "user", "content": "hello"}])
        of_kept = await client.responses.input_tokens.count(model="tiny", conversation=kept.id)
        assert of_kept.input_tokens == len(counted(backend).messages_json)
        item: Any = {"type": "item_reference", "id": first.output[0].id}
        await client.responses.input_tokens.count(model="tiny", input=[{"role": "user", "content": "hi"}, item])
        assert b"Hello you" in counted(backend).messages_json


async def test_a_truncated_input_has_what_is_left_of_it(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    most = backend.resolved.max_model_len
    whole = await client.responses.input_tokens.count(model="tiny", input="x" * (2 * most))
    assert whole.input_tokens > most
    cut = await client.responses.input_tokens.count(model="tiny", input="x" * (2 * most), truncation="auto")
    assert cut.input_tokens == most - 1


@pytest.mark.parametrize(
    ("fields", "status", "begin"),
    [
        ({}, 400, "input: give a text or a list of items"),
        ({"input": []}, 400, "input: give"),
        ({"input": [5]}, 400, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            400,
            "input[0].content[0]",
        ),
        ({"input": "a", "model": "huge"}, 404, "The model `huge` does not exist"),
        ({"input": "a", "previous_response_id": "resp_1"}, 404, "previous_response_id: there is no response"),
        ({"input": "a", "conversation": "conv_1"}, 404, "conversation: there is no conversation"),
        ({"input": "a", "conversation": "conv_1", "previous_response_id": "resp_1"}, 400, "conversation: give either"),
        ({"input": "a", "tools": [{"type": "function"}]}, 400, "tools[0].name"),
        (
            {"input": "a", "tools": TOOLS, "tool_choice": {"type": "file_search"}},
            400,
            "tool_choice: type 'file_search'",
        ),
        ({"input": "a", "text": {"format": {"type": "grammar"}}}, 400, "text.format: "),
        ({"input": "a", "truncation": "some"}, 400, "truncation"),
        ({"input": "a", "personality": "friendly"}, 400, "personality: not supported"),
        ({"input": "a", "extra_body": {"messages": []}}, 200, ""),
        (
            {"input": "a", "extra_body": {"messages": [{"role": "user"}]}},
            400,
            "messages: not supported on this path; input is",
        ),
    ],
    ids=str,
)
async def test_bad_input_is_named(client: openai.AsyncOpenAI, fields: Json, status: int, begin: str) -> None:
    asked: Any = {"model": "tiny", **fields}
    if status == 200:
        assert (await client.responses.input_tokens.count(**asked)).input_tokens
        return
    with pytest.raises(openai.APIStatusError) as told:
        await client.responses.input_tokens.count(**asked)
    body: Any = told.value.body
    assert (told.value.status_code, body["message"][: len(begin)]) == (status, begin)


async def test_fields_of_the_answer_alone_change_nothing(backend: Scripted, client: openai.AsyncOpenAI) -> None:
    await client.responses.input_tokens.count(model="tiny", input="a", extra_body={"temperature": 0.5, "alpha": 1})
    assert backend.ignored_fields == ("alpha", "temperature")


async def test_what_the_tokenizer_refuses_is_told_in_this_apis_words(
    backend: Scripted, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(message: Tokenize) -> TokenizeReply:
        return TokenizeReply(
            message.handle, error="messages: the template takes no system message", kind=ErrorKind.INVALID
        )

    monkeypatch.setattr(backend, "ask", refused)
    with pytest.raises(openai.BadRequestError, match="the template takes no system message"):
        await client.responses.input_tokens.count(model="tiny", input="a")
