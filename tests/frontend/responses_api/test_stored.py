"""Responses that are stored: asked for again, gone on with, listed, deleted, and computed in the background."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai_client import CALL, LIMIT_S, OFF, SERVER, TOOLS, Frontend, client_of, ended, messages_of
from scripted import Scripted

from meshlm.frontend.errors import HttpError
from meshlm.frontend.responses_api import background, routes, store
from meshlm.frontend.responses_api.records import Chunk, Stored, Written
from meshlm.frontend.responses_api.store import Store
from meshlm.protocol.ids import ErrorKind

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


# --- in the background ---


async def test_in_the_background(frontends: Frontend) -> None:
    backend = frontends()
    backend.go.clear()
    backend.pieces = ["hm</think>", "Hello", " you"]
    async with client_of(backend) as client:
        parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        begun = await client.responses.create(model="tiny", input="hi", background=True, extra_headers=parent)
        assert (begun.status, begun.output, begun.background) == ("queued", [], True)
        with pytest.raises(openai.BadRequestError, match="still computed"):
            await client.responses.create(model="tiny", input="so?", previous_response_id=begun.id)
        backend.go.set()
        found = await ended(client, begun.id)
        assert (found.status, found.output_text, found.created_at) == ("completed", "Hello you", begun.created_at)
        assert [answer.trace_headers for answer in backend.answers] == [parent]
        assert [item.type for item in found.output] == ["reasoning", "message"]
        with pytest.raises(openai.BadRequestError, match="completed already"):
            await client.responses.cancel(begun.id)


async def events_of(stream: Any) -> list[Any]:
    async with asyncio.timeout(LIMIT_S):
        return [event async for event in stream]


async def follow(client: openai.AsyncOpenAI, response_id: str) -> list[Any]:
    return await events_of(await client.responses.retrieve(response_id, stream=True))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_its_events_can_be_had_from_any_number_on(frontends: Frontend) -> None:
    """While they come and after, from each frontend: the same, and none twice."""
    backend, other = frontends(), frontends()
    backend.pieces = ["hm", "</think>", "Hello", " you", CALL]
    async with client_of(backend) as client, client_of(other) as elsewhere:
        asked: Any = {"model": "tiny", "input": "hi", "background": True, "tools": TOOLS}
        first = await events_of(await client.responses.create(**asked, stream=True))
        assert [event.sequence_number for event in first] == list(range(len(first)))
        assert (first[0].response.status, first[-1].type) == ("queued", "response.completed")
        response_id = first[0].response.id
        assert await client.responses.retrieve(response_id) == first[-1].response
        for one in (client, elsewhere):
            assert await events_of(await one.responses.retrieve(response_id, stream=True)) == first
        for after in range(len(first)):
            rest = await events_of(await elsewhere.responses.retrieve(response_id, stream=True, starting_after=after))
            assert rest == first[after + 1 :]
        backend.go.clear()
        begun = await client.responses.create(**asked)
        streams = [asyncio.ensure_future(follow(one, begun.id)) for one in (client, elsewhere)]
        backend.go.set()
        for found in await asyncio.gather(*streams):
            assert len(found) == len(first)


async def test_one_that_is_cancelled_is_computed_no_further(frontends: Frontend) -> None:
    backend, other = frontends(), frontends()
    for canceller in (backend, other):
        backend.go.clear()
        async with client_of(backend) as client, client_of(canceller) as elsewhere:
            begun = await client.responses.create(model="tiny", input="hi", background=True)
            cancelled = await elsewhere.responses.cancel(begun.id)
            assert cancelled.status == "cancelled"
            assert await elsewhere.responses.cancel(begun.id) == cancelled, "once more is as well"
            name = begun.id
            await until(lambda: any(c.submit.request_ids[0].startswith(name) for c in backend.closed))  # noqa: B023
            assert backend.closed[-1].submit.retry is None, "so that the mesh ends it at once"
            assert (await client.responses.retrieve(begun.id)).status == "cancelled"
            assert len(await events_of(await client.responses.retrieve(begun.id, stream=True))) == 1
        backend.go.set()


async def test_one_that_is_not_in_the_background(frontends: Frontend) -> None:
    async with client_of(frontends()) as client:
        answer = await client.responses.create(model="tiny", input="hi")
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(answer.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.retrieve(answer.id, stream=True)
        for query in ({"starting_after": "1"}, {"stream": "perhaps"}):
            with pytest.raises(openai.BadRequestError):
                await client.responses.retrieve(answer.id, extra_query=query)


@pytest.mark.parametrize("pieces", [[], ["hm"], ["hm</think>", "Hello"]])
async def test_one_that_fails(frontends: Frontend, pieces: list[str]) -> None:
    backend = frontends()
    backend.pieces, backend.failure = pieces, (ErrorKind.INTERNAL, "its worker died too often", "")
    async with client_of(backend) as client:
        stream = await client.responses.create(model="tiny", input="hi", background=True, stream=True)
        events = await events_of(stream)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.failed"
        found = await client.responses.retrieve(events[0].response.id)
        assert found == events[-1].response
        assert found.error is not None
        assert found.error.message == "its worker died too often"


async def test_one_for_which_there_is_no_room_waits(frontends: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "DEFER_S", 0.0)
    backend = frontends()
    backend.pieces, backend.failure = (), (ErrorKind.OVERLOADED, "full", "")
    async with client_of(backend) as client:
        begun = await client.responses.create(model="tiny", input="hi", background=True, extra_body={"reasoning": OFF})
        await until(lambda: len(backend.submits) > 1)
        backend.pieces, backend.failure = ("Hello",), None
        assert (await ended(client, begun.id)).output_text == "Hello"


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("killed_at", [0, 1, 3, 5, 6])
async def test_another_frontend_goes_on_where_one_died(
    frontends: Frontend, monkeypatch: pytest.MonkeyPatch, killed_at: int, flushed: bool
) -> None:
    """A client that follows it gets every event once, with the text of an answer that nothing disturbed."""
    monkeypatch.setattr(background, "LEASE_S", 0.2)
    pieces = ["hm", " so", "</think>", "Hello", " you", CALL]
    backend, other = frontends(), frontends()
    backend.pieces = other.pieces = pieces
    asked: Any = {"model": "tiny", "input": "hi", "background": True, "tools": TOOLS}
    async with client_of(other) as client:
        undisturbed = await ended(client, (await client.responses.create(**asked)).id)
    backend.stops_at = killed_at
    async with client_of(backend) as client, client_of(other) as elsewhere:
        begun = await client.responses.create(**asked)
        following = asyncio.ensure_future(follow(elsewhere, begun.id))
        await until(lambda: bool(backend.submits) and backend.num_said >= killed_at)
        shelf = backend.routes.responses._shelf
        async with asyncio.timeout(LIMIT_S):  # what came is in the store, or on its way
            while flushed and (await shelf.find(begun.id, "")).tokens < killed_at:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        monkeypatch.setattr(backend.routes.responses._background, "_settle", nothing)
        for task in list(backend.routes.responses._background._tasks):
            task.cancel()
        events = await following
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert last.status == "completed"
    assert [item.to_dict() | {"id": "", "call_id": ""} for item in last.output] == [
        item.to_dict() | {"id": "", "call_id": ""} for item in undisturbed.output
    ]
    texts: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
    assert texts == {0: "hm so", 1: "Hello you", 2: '{"city": "Bärn"}'}
    first, second = backend.submits[-1].retry, other.submits[-1].retry
    assert first is not None
    assert second is not None
    assert (first.key, first.body) == (second.key, second.body), "so that the mesh knows that it is the same"


async def nothing(*_: object) -> None: ...


async def test_one_that_a_stopping_frontend_leaves_goes_on_elsewhere(frontends: Frontend) -> None:
    """At once: nobody waits for its lease to end."""
    backend, other = frontends(), frontends()
    backend.stops_at = 1
    async with client_of(backend) as client, client_of(other) as elsewhere:
        asked: Any = {"model": "tiny", "input": "hi", "background": True, "extra_body": {"reasoning": OFF}}
        begun = await client.responses.create(**asked)
        await until(lambda: backend.num_said == 1)
        await backend.routes.responses.stop()
        assert backend.closed[-1].submit.retry is not None, "so that the mesh goes on with it"
        assert (await ended(elsewhere, begun.id)).output_text == "Hello you"


async def test_who_leaves_ends_what_is_not_in_the_background(frontends: Frontend) -> None:
    backend = frontends()
    backend.go.clear()
    for in_background in (False, True):
        left = asyncio.Event()
        body = msgspec.json.encode({"input": "hi", "stream": True, "background": in_background})
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Json:
            if messages:  # noqa: B023
                return messages.pop()  # noqa: B023
            await left.wait()  # noqa: B023
            return {"type": "http.disconnect"}

        async def send(message: Json) -> None: ...

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/responses",
            "raw_path": b"/v1/responses",
            "root_path": "",
            "query_string": b"",
            "headers": [],
            "scheme": "http",
        }
        asked = asyncio.ensure_future(backend.app(scope, receive, send))
        number = len(backend.submits)
        await until(lambda: len(backend.submits) > number)  # noqa: B023
        left.set()
        async with asyncio.timeout(LIMIT_S):
            await asked
        assert bool(backend.closed) != in_background
        backend.closed.clear()
    async with client_of(backend) as client:
        backend.go.set()
        name = str(backend.submits[-1].request_ids[0]).rsplit("-", 1)[0]
        assert (await ended(client, name)).status == "completed"


async def test_what_could_not_be_written_is_written_later(frontends: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    """And clients wait for it: they have no event that the store has not."""
    backend = frontends()
    shelf = backend.routes.responses._shelf
    write, failures = shelf.write, [0]

    async def fails(news: Any, lease_s: float) -> list[str]:
        if any(one.chunk is not None for one in news) and failures[0] < 3:
            failures[0] += 1
            raise HttpError(500, "the disk is full")
        return await write(news, lease_s)

    monkeypatch.setattr(shelf, "write", fails)
    backend.pieces = ["Hello", " you", " all"]
    async with client_of(backend) as client:
        asked: Any = {"model": "tiny", "input": "hi", "background": True, "extra_body": {"reasoning": OFF}}
        backend.go.clear()
        stream = asyncio.ensure_future(client.responses.create(**asked, stream=True))
        await until(lambda: bool(backend.submits))
        backend.go.set()
        events = await events_of(await stream)
    assert failures[0] > 0
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type.endswith(".delta")) == "Hello you all"


async def test_streams_of_the_store_are_limited(frontends: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_of(frontends()) as client:
        begun = await client.responses.create(model="tiny", input="hi", background=True)
        await ended(client, begun.id)
        assert len(await follow(client, begun.id)) > 1
        assert len(await follow(client, begun.id)) > 1, "one that is over does not count"
        monkeypatch.setattr(routes, "MAX_FOLLOWED", 0)
        with pytest.raises(openai.InternalServerError, match="streams of stored responses"):
            await follow(client, begun.id)


# --- the store ---


LEAST = b'{"output": [], "x": "%b"}' % (b"x" * 80)
AGAIN = b'{"output": [], "by": "it"}'


def stored(name: str, **changes: Any) -> Stored:
    least = Stored(
        id=name, key="k", status="completed", background=False, created=1, previous="", answer=LEAST, items=b"[]"
    )
    return msgspec.structs.replace(least, **changes)


def test_what_is_used_least_goes_first(tmp_path: Path) -> None:
    shelf = Store(tmp_path / "s", 3, 1 << 20)
    shelf.put(stored("runs", lease=99.0, holder="h"), 0.0)
    for place, name in enumerate("abc"):
        shelf.put(stored(name), 1.0 + place)
        shelf.get("a", "k", 1.5 + place)
    assert [name for name in ("runs", "a", "b", "c") if shelf.get(name, "k", 9.0)] == ["runs", "a", "c"]
    assert shelf.get("a", "other", 9.0) is None
    small = Store(tmp_path / "t", 99, 250)
    for name in "abc":
        small.put(stored(name), 1.0)
    assert sum(small.get(name, "k", 9.0) is not None for name in "abc") == 2
    shelf.close()
    small.close()


def test_a_name_is_one_keys(tmp_path: Path) -> None:
    shelf = Store(tmp_path / "s", 9, 1 << 20)
    assert shelf.put(stored("a"), 0.0)
    assert not shelf.put(stored("a", key="other", answer=b'{"output": [], "by": "other"}'), 1.0)
    assert shelf.put(stored("a", answer=AGAIN), 1.0)
    found = shelf.get("a", "k", 2.0)
    assert found is not None
    assert found.answer == AGAIN
    shelf.close()


def test_a_holder_that_is_gone_writes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "s"
    one, other = Store(path, 9, 1 << 20), Store(path, 9, 1 << 20)
    assert path.stat().st_mode & 0o777 == 0o600
    one.put(stored("a", holder="one", lease=10.0), 0.0)
    assert one.write("one", [Written("a", Chunk(0, 2, b"x\n\ny\n\n"), 3, 2)], 12.0) == []
    assert other.claim("other", 11.0, 20.0, 9) == []
    (claimed,) = other.claim("other", 13.0, 20.0, 9)
    assert (claimed.tokens, claimed.next_event, claimed.attempts, claimed.holder) == (3, 2, 1, "other")
    assert one.write("one", [Written("a", Chunk(2, 1, b"z\n\n"), 4, 3)], 30.0) == ["a"]
    one.release("a", "one", 0.0)
    assert other.write("other", [Written("a", Chunk(2, 1, b"w\n\n"), 4, 3, "completed", LEAST)], 30.0) == []
    assert one.events("a", 0) == ("completed", [Chunk(1, 1, b"y\n\n"), Chunk(2, 1, b"w\n\n")])
    assert other.claim("other", 99.0, 120.0, 9) == []
    assert not one.cancel("a", "k", b"late")
    assert one.delete("a", "k")
    assert other.events("a", -1) == (None, [])
    one.close()
    other.close()


def test_many_events_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_READ", 100)
    shelf = Store(tmp_path / "s", 9, 1 << 20)
    shelf.put(stored("a", holder="h", lease=10.0), 0.0)
    for place in range(9):
        shelf.write("h", [Written("a", Chunk(place, 1, b"x" * 48 + b"\n\n"), place, place)], 10.0)
    after, found = -1, 0
    while chunks := shelf.events("a", after)[1]:
        assert len(chunks) <= 3
        after, found = chunks[-1].first, found + len(chunks)
    assert found == 9
    shelf.close()
