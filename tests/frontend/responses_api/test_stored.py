"""Responses that are stored: found again, gone on with and referred to, by their own key alone."""

from typing import Any

import msgspec
import openai
import pytest
from openai_client import CALL, OFF, SERVER, TOOLS, Frontend, client_of, ended, messages_of
from scripted import Scripted

Json = dict[str, Any]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_answered_is_found_again(frontends: Frontend, stream: bool) -> None:
    """By every frontend, and as soon as its client has the end."""
    async with client_of(frontends()) as client, client_of(frontends()) as other:
        answer: Any = await client.responses.create(
            model="tiny", input="hi", extra_body={"reasoning": OFF}, stream=stream
        )
        if stream:
            answer = [event async for event in answer][-1].response
        assert await other.responses.retrieve(answer.id) == answer
        assert answer.to_dict()["store"] is True
        await other.responses.delete(answer.id)
        for one in (client, other):
            with pytest.raises(openai.NotFoundError):
                await one.responses.retrieve(answer.id)


async def test_a_conversation_goes_on(frontends: Frontend) -> None:
    backend = frontends()
    async with client_of(backend) as client:
        backend.pieces = ["hm</think>", "I look.", CALL]
        first = await client.responses.create(model="tiny", input="weather?", instructions="Be kind.", tools=TOOLS)
        call: Any = first.output[-1]
        backend.pieces = ["</think>", "Rain."]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = await client.responses.create(
            model="tiny", input=[result], previous_response_id=first.id, instructions="Be brief.", tools=TOOLS
        )
        await client.responses.create(model="tiny", input="thanks", previous_response_id=second.id)
        function = {"name": "weather", "arguments": '{"city": "Bärn"}'}
        said = {"content": "I look.", "reasoning": "hm"}
        assert messages_of(backend) == [
            {"role": "user", "content": "weather?"},
            {
                "role": "assistant",
                **said,
                "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
            {"role": "assistant", "content": "Rain."},
            {"role": "user", "content": "thanks"},
        ]
        assert second.previous_response_id == first.id
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(model="tiny", input="so?", previous_response_id=second.id)
        assert missing.value.param == "previous_response_id"


async def test_earlier_messages_are_stored_with_their_response(frontends: Frontend) -> None:
    backend = frontends()
    earlier = [{"role": "user", "content": "weather?"}, {"role": "assistant", "content": "Rain."}]
    async with client_of(backend) as client:
        extra = {"previous_input_messages": earlier, "reasoning": OFF}
        first = await client.responses.create(model="tiny", input="sure?", extra_body=extra)
        await client.responses.create(model="tiny", input="thanks", previous_response_id=first.id)
        assert messages_of(backend) == [
            *earlier,
            {"role": "user", "content": "sure?"},
            {"role": "assistant", "content": "Hello you"},
            {"role": "user", "content": "thanks"},
        ]
        listed = [item.type async for item in client.responses.input_items.list(first.id)]
        assert listed == ["message"] * 3


async def test_items_may_be_referred_to(frontends: Frontend) -> None:
    """As clients do that keep the names of items, and not their texts."""
    backend = frontends()
    backend.pieces = ["hm</think>", "I look.", CALL]
    async with client_of(backend) as client, client_of(frontends()) as other:
        first = await client.responses.create(model="tiny", input="weather?", tools=TOOLS)
        asked = (await client.responses.input_items.list(first.id)).data[0]
        call: Any = first.output[-1]
        references: list[Any] = [{"type": "item_reference", "id": item.id} for item in [asked, *first.output]]
        references[1] = {"id": references[1]["id"]}
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        second = await client.responses.create(model="tiny", input=[*references, result])
        assert [(message["role"], message["content"]) for message in messages_of(backend)] == [
            ("user", "weather?"),
            ("assistant", "I look."),
            ("tool", "rain"),
        ]
        assert messages_of(backend)[1]["reasoning"] == "hm"
        listed = [item async for item in other.responses.input_items.list(second.id, order="asc")]
        assert [item.type for item in listed] == [
            "message",
            "reasoning",
            "message",
            "function_call",
            "function_call_output",
        ]
        late = await client.responses.create(model="tiny", input=references, background=True)
        assert (await ended(client, late.id)).status == "completed"
        for response in (first, second, late):
            await client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(model="tiny", input=references)
        assert missing.value.param == "input"


async def test_input_items_are_listed(frontends: Frontend) -> None:
    async with client_of(frontends()) as client:
        given: list[Any] = [{"role": "user", "content": str(place)} for place in range(5)]
        given.append({"role": "assistant", "content": "yes"})
        answer = await client.responses.create(model="tiny", input=given)
        listed = [item async for item in client.responses.input_items.list(answer.id, limit=2, order="asc")]
        texts = [getattr(item, "content")[0].text for item in listed]  # noqa: B009
        assert texts == ["0", "1", "2", "3", "4", "yes"]
        newest = await client.responses.input_items.list(answer.id, limit=1)
        assert newest.data[0].id == listed[-1].id
        assert newest.has_more
        for query in ({"order": "up"}, {"limit": "0"}, {"limit": "x"}, {"after": "msg_1"}):
            with pytest.raises(openai.BadRequestError):
                await client.responses.input_items.list(answer.id, extra_query=query)


async def test_a_key_finds_its_own_alone(frontends: Frontend) -> None:
    server = msgspec.structs.replace(SERVER, api_key=("one", "two"))
    backend = frontends(server)
    async with client_of(backend, "one") as one, client_of(backend, "two") as two:
        answer = await one.responses.create(model="tiny", input="hi")
        late = await one.responses.create(model="tiny", input="hi", background=True)
        assert (await one.responses.retrieve(answer.id)).id == answer.id
        for response_id in (answer.id, late.id):
            for ask in (two.responses.retrieve, two.responses.delete, two.responses.cancel):
                with pytest.raises(openai.NotFoundError):
                    await ask(response_id)
            with pytest.raises(openai.NotFoundError):
                await two.responses.create(model="tiny", input="so?", previous_response_id=response_id)
            with pytest.raises(openai.NotFoundError):
                await two.responses.input_items.list(response_id)


async def test_what_is_not_to_be_stored_is_not(frontends: Frontend) -> None:
    async with client_of(frontends()) as client:
        answer = await client.responses.create(model="tiny", input="hi", store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)
        named: Json = {"request_id": "mine"}
        assert (await client.responses.create(model="tiny", input="hi", extra_body=named)).id == "resp_mine"


async def test_a_server_may_store_nothing() -> None:
    async with client_of(Scripted(SERVER)) as client:
        answer = await client.responses.create(model="tiny", input="hi")
        assert answer.to_dict()["store"] is False
        for field in ("store", "background"):
            with pytest.raises(openai.BadRequestError, match="--responses-store"):
                await client.post("/responses", body={"model": "tiny", "input": "hi", field: True}, cast_to=object)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_where_the_store_fails_the_answer_comes_all_the_same(frontends: Frontend, stream: bool) -> None:
    """It was computed: the client gets it, and reads that it is not stored."""
    backend = frontends()
    async with client_of(backend) as client:
        first = await client.responses.create(model="tiny", input="hi")
        break_store(backend)
        body: Any = {"reasoning": OFF}
        answer: Any = await client.responses.create(model="tiny", input="x" * 100_000, stream=stream, extra_body=body)
        if stream:
            events = [event async for event in answer]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            answer = events[-1].response
        assert (answer.status, answer.output_text) == ("completed", "Hello you")
        assert answer.to_dict()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)
        assert await client.responses.retrieve(first.id) == first


async def test_a_conversation_that_would_lack_a_turn_says_why(frontends: Frontend) -> None:
    backend = frontends()
    async with client_of(backend) as client:
        conversation = await client.conversations.create()
        break_store(backend)
        with pytest.raises(openai.InternalServerError, match="database or disk is full"):
            await client.responses.create(model="tiny", input="x" * 100_000, conversation=conversation.id)
        with pytest.raises(openai.InternalServerError, match="database or disk is full"):
            await client.responses.create(model="tiny", input="x" * 100_000, background=True)


def break_store(backend: Scripted) -> None:
    """Its disk is full."""
    shelf = backend.routes.responses._shelf
    assert shelf._store is not None
    (pages,) = shelf._store._db.execute("PRAGMA page_count").fetchone()
    shelf._store._db.execute(f"PRAGMA max_page_count = {pages}")


async def test_a_name_that_no_path_reaches_is_refused(frontends: Frontend) -> None:
    async with client_of(frontends()) as client:
        for fields in ({}, {"background": True}):
            with pytest.raises(openai.BadRequestError, match="request_id"):
                await client.responses.create(model="tiny", input="hi", extra_body={"request_id": "a/b", **fields})
        answer = await client.responses.create(model="tiny", input="hi", extra_body={"request_id": "a/b"}, store=False)
        assert answer.id == "resp_a/b"
        named = await client.responses.create(model="tiny", input="hi", extra_body={"request_id": "a?c#d%2f.."})
        assert (await client.responses.retrieve(named.id)).id == named.id


async def test_an_item_with_a_slash_in_its_name_is_found(frontends: Frontend) -> None:
    async with client_of(frontends()) as client:
        conversation = await client.conversations.create()
        item: Any = {"type": "message", "role": "user", "content": "hi", "id": "a/b"}
        await client.conversations.items.create(conversation.id, items=[item])
        found = await client.conversations.items.retrieve("a/b", conversation_id=conversation.id)
        assert found.to_dict()["id"] == "a/b"
        await client.conversations.items.delete("a/b", conversation_id=conversation.id)
        with pytest.raises(openai.NotFoundError):
            await client.conversations.items.retrieve("a/b", conversation_id=conversation.id)
