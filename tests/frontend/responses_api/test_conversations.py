"""/v1/conversations as OpenAI's own client uses it, and the responses that add to them."""

from typing import Any

import msgspec
import openai
import pytest
from openai_client import OFF, SERVER, Frontend, client_of, ended, messages_of

from meshlm.frontend.responses_api.records import Conversation
from meshlm.frontend.responses_api.store import Conversations, Store

USER: Any = {"type": "message", "role": "user", "content": "My name is Ada."}


async def texts(client: openai.AsyncOpenAI, name: str) -> list[str]:
    listed = [item async for item in client.conversations.items.list(name, order="asc", limit=2)]
    return ["".join(part.text for part in getattr(item, "content")) for item in listed]  # noqa: B009


async def test_a_conversation_and_its_items(frontends: Frontend) -> None:
    async with client_of(frontends()) as client, client_of(frontends()) as other:
        begun = await client.conversations.create(items=[USER], metadata={"a": "b"})
        assert (begun.object, begun.metadata) == ("conversation", {"a": "b"})
        assert await other.conversations.retrieve(begun.id) == begun
        changed = await client.conversations.update(begun.id, metadata={"c": "d"})
        assert (changed.metadata, changed.created_at) == ({"c": "d"}, begun.created_at)
        more: Any = [{"role": "user", "content": str(place)} for place in range(4)]
        added = await other.conversations.items.create(begun.id, items=more)
        assert len({item.id for item in added.data}) == 4
        assert await texts(client, begun.id) == ["My name is Ada.", "0", "1", "2", "3"]
        first = await client.conversations.items.retrieve(added.data[0].id or "", conversation_id=begun.id)
        assert first == added.data[0]
        await client.conversations.items.delete(first.id or "", conversation_id=begun.id)
        assert await texts(client, begun.id) == ["My name is Ada.", "1", "2", "3"]
        for ask in (client.conversations.items.retrieve, client.conversations.items.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(first.id or "", conversation_id=begun.id)
        gone = await client.conversations.delete(begun.id)
        assert (gone.object, gone.deleted) == ("conversation.deleted", True)
        with pytest.raises(openai.NotFoundError):
            await other.conversations.retrieve(begun.id)


@pytest.mark.parametrize("how", [{}, {"stream": True}, {"background": True}])
async def test_responses_add_to_it(frontends: Frontend, how: Any) -> None:
    backend = frontends()
    async with client_of(backend) as client:
        begun = await client.conversations.create(items=[USER])
        asked: Any = {"model": "tiny", "input": "And mine?", "conversation": begun.id, "extra_body": {"reasoning": OFF}}
        answer: Any = await client.responses.create(**asked, **how)
        if "stream" in how:
            answer = [event async for event in answer][-1].response
        await ended(client, answer.id)
        assert answer.conversation.id == begun.id
        assert messages_of(backend) == [
            {"role": "user", "content": "My name is Ada."},
            {"role": "user", "content": "And mine?"},
        ]
        assert await texts(client, begun.id) == ["My name is Ada.", "And mine?", "Hello you"]
        by_object: Any = {**asked, "conversation": {"id": begun.id}}
        await client.responses.create(**by_object)
        assert [message["role"] for message in messages_of(backend)] == ["user", "user", "assistant", "user"]
        with pytest.raises(openai.BadRequestError, match="conversation"):
            await client.responses.create(model="tiny", input="so?", previous_response_id=answer.id)


async def test_what_failed_or_was_cancelled_adds_nothing(frontends: Frontend) -> None:
    backend = frontends()
    backend.go.clear()
    async with client_of(backend) as client:
        begun = await client.conversations.create(items=[USER])
        late = await client.responses.create(model="tiny", input="hi", conversation=begun.id, background=True)
        await client.responses.cancel(late.id)
        assert await texts(client, begun.id) == ["My name is Ada."]


async def test_what_is_wrong_is_named(frontends: Frontend) -> None:
    async with client_of(frontends()) as client:
        begun = await client.conversations.create()
        many: Any = [USER] * 21
        wrong: Any = [{"type": "web_search_call"}]
        for given, text in ((many, "items: 21 items"), (wrong, r"items\[0\]: items of type")):
            with pytest.raises(openai.BadRequestError, match=text):
                await client.conversations.create(items=given)
            with pytest.raises(openai.BadRequestError, match=text):
                await client.conversations.items.create(begun.id, items=given)
        for body, field in (({"metadata": {"a": "b" * 600}}, "metadata"), ({"metadata": 5}, "metadata")):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.post("/conversations", body=body, cast_to=object)
            assert caught.value.param == field
        asked: Any = {"model": "tiny", "input": "hi"}
        for fields in ({"conversation": 5}, {"conversation": begun.id, "previous_response_id": "resp_1"}):
            with pytest.raises(openai.BadRequestError, match="conversation"):
                await client.post("/responses", body={**asked, **fields}, cast_to=object)
        with pytest.raises(openai.BadRequestError, match="store"):
            await client.responses.create(**asked, conversation=begun.id, store=False)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(**asked, conversation="conv_1")
        assert missing.value.param == "conversation"


async def test_a_key_finds_its_own_alone(frontends: Frontend) -> None:
    backend = frontends(msgspec.structs.replace(SERVER, api_key=("one", "two")))
    async with client_of(backend, "one") as one, client_of(backend, "two") as two:
        begun = await one.conversations.create(items=[USER])
        item = (await one.conversations.items.list(begun.id)).data[0]
        conversations = two.conversations
        for ask in (conversations.retrieve, conversations.delete, conversations.items.list):
            with pytest.raises(openai.NotFoundError):
                await ask(begun.id)
        with pytest.raises(openai.NotFoundError):
            await conversations.items.delete(item.id or "", conversation_id=begun.id)
        with pytest.raises(openai.NotFoundError):
            await two.responses.create(model="tiny", input="hi", conversation=begun.id)
        assert await texts(one, begun.id) == ["My name is Ada."]


def test_conversations_count_towards_the_limits(tmp_path: Any) -> None:
    shelf = Store(tmp_path / "s", 99, 300)
    for place, name in enumerate("abc"):
        shelf.put_conversation(Conversation(f"conv_{name}", "k", 1, b"{}"), [{"id": "1", "x": "y" * 100}], float(place))
    kept: Conversations = shelf.conversations
    assert [kept.get(f"conv_{name}", "k", 9.0) is not None for name in "abc"] == [False, True, True]
    assert kept.items("conv_a") == []
    assert shelf.delete_item("conv_b", "1")
    assert not shelf.delete_item("conv_b", "1")
    shelf.put_conversation(Conversation("conv_d", "k", 1, b"{}"), [{"id": "1", "x": "y" * 100}], 9.0)
    assert kept.get("conv_c", "k", 9.0) is not None, "there is room again"
    shelf.close()
