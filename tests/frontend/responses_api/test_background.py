"""Responses in the background: followed by any frontend, cancelled, refused, and gone on with where a frontend dies or stops."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest
from openai_client import CALL, LIMIT_S, OFF, TOOLS, Frontend, client_of, ended

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.responses_api import background, routes
from meshlm.protocol.wire.ids import ErrorKind

Json = dict[str, Any]


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
