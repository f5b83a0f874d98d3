"""The Python API's client: prompts leave one by one while answers come back, none is left behind when one cannot be made, and what a
detokenizer had when it died is asked again."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from meshlm.protocol.edges.text import (
    Abort,
    Attach,
    Finished,
    Rejected,
    Submit,
    TextDeltas,
    TextPrompt,
    Tokenize,
    TokenizeReply,
)
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind, FinishReason, Handle, Identity, Incarnation, Role
from meshlm.runtime.client.draft_metrics import DraftsTold, metrics_of
from meshlm.runtime.errors import LinkFull, MessageTooLong
from meshlm.runtime.process.deaths import MAX_DEATHS, WINDOW_S
from meshlm.supervisor.api.client import SENDS_A_TURN, Client, Sent, name_of
from meshlm.supervisor.api.outputs import CompletionOutput, RequestOutput

DETOKENIZER = Identity(Role.DETOKENIZER)
DRAFTS = bytes((2, 1, 3, 0))


class StubMesh:
    """Answers each Submit with one token and the end: at once, or from number `later` on a moment later."""

    def __init__(self, client: Client, later: int) -> None:
        self.sent: list[Struct] = []
        self._client, self._later = client, later

    def in_hand_of(self, peer: Identity, incarnation: Incarnation) -> tuple[str, ...]:
        return ()

    def peers(self, role: Role) -> list[Identity]:
        return [DETOKENIZER]

    def send(self, peer: Identity, message: Struct) -> None:
        self.sent.append(message)
        if isinstance(message, Submit):
            answer = ended(message.handles[0])
            if len(self.sent) <= self._later:
                self._client.on_message(DETOKENIZER, answer)
            else:
                asyncio.get_running_loop().call_later(0.02, self._client.on_message, DETOKENIZER, answer)


def ended(handle: Handle) -> TextDeltas:
    end = Finished(0, FinishReason.LENGTH, drafts=DRAFTS)
    return TextDeltas(pack_i32([handle]), pack_i32([0]), b"", pack_i32([7]), ["x"], [end])


def asks(client: Client, count: int) -> Iterator[Sent]:
    for number in range(count):
        name, prompt = f"r{number}", TextPrompt("a")
        submit = Submit((client.new_handle(),), (name_of(name, 0),), prompt, SamplingParams())
        yield Sent(submit, RequestOutput(name, "a", [], [CompletionOutput(0)]))


def connected(later: int) -> tuple[Client, StubMesh]:
    client = Client()
    stub = StubMesh(client, later)
    mesh: Any = stub
    client.mesh_client.mesh = mesh
    client.on_peer_up(DETOKENIZER, Incarnation(1))
    return client, stub


@pytest.mark.parametrize("later", [0, SENDS_A_TURN, 1000], ids=["later", "the last later", "at once"])
def test_all_answers_are_waited_for(later: int) -> None:
    """Also when those that were sent have all ended before the next ones are sent."""

    async def run() -> list[RequestOutput]:
        client, _ = connected(later)
        return await asyncio.wait_for(client.run(asks(client, SENDS_A_TURN + 5), None), 30)

    outputs = asyncio.run(run())
    assert [output.request_id for output in outputs] == [f"r{number}" for number in range(SENDS_A_TURN + 5)]
    assert all(output.finished and output.outputs[0].token_ids == [7] for output in outputs)


@pytest.mark.parametrize("told", [None, DraftsTold(3, by_step=True)])
def test_outputs_tell_of_their_drafts_where_that_is_asked_for(told: DraftsTold | None) -> None:
    async def run() -> RequestOutput:
        client, _ = connected(0)
        client.counts.drafts_told = told
        (found,) = await asyncio.wait_for(client.run(asks(client, 1), None), 30)
        return found

    (output,) = asyncio.run(run()).outputs
    assert output.spec_decode_metrics == (None if told is None else metrics_of(DRAFTS, told))


def test_a_prompt_that_cannot_be_made_ends_those_before_it() -> None:
    async def run() -> None:
        client, stub = connected(0)

        def broken() -> Iterator[Sent]:
            yield from asks(client, 3)
            raise ValueError("no prompt")

        with pytest.raises(ValueError, match="no prompt"):
            await client.run(broken(), None)
        assert stub.sent[-1] == Abort((name_of("r0", 0), name_of("r1", 0), name_of("r2", 0)))
        (one,) = await asyncio.wait_for(client.run(asks(client, 1), None), 30)
        assert one.finished  # the answers to the three came nevertheless, and before

    asyncio.run(run())


def test_two_callers_at_once_have_each_their_own() -> None:
    """One's refusal is not the other's, and what one has given up the other still waits for."""

    async def run() -> None:
        client, stub = connected(0)
        news: list[list[int]] = []

        def names(prefix: str) -> Iterator[Sent]:
            for submit, request, _ in asks(client, 2):
                name = name_of(f"{prefix}{request.request_id}", 0)
                yield Sent(msgspec.structs.replace(submit, request_ids=(name,)), request)

        first = asyncio.ensure_future(client.run(names("a"), None))
        second = asyncio.ensure_future(
            client.run(names("b"), None, lambda outputs: news.append([output.token_ids[-1] for output in outputs]))
        )
        third = asyncio.ensure_future(client.run(names("c"), None))
        await asyncio.sleep(0)
        third.cancel()
        handles = [message.handles for message in stub.sent if isinstance(message, Submit)]
        client.on_message(DETOKENIZER, Rejected(handles[0], ErrorKind.INVALID, "too long"))
        with pytest.raises(ValueError, match="too long"):
            await asyncio.wait_for(first, 30)
        assert all(one.finished for one in await asyncio.wait_for(second, 30))
        assert news == [[7], [7]]
        assert stub.sent[-1] == Abort((name_of("cr0", 0), name_of("cr1", 0)))

    asyncio.run(run())


# --- deaths ---


class SilentMesh:
    """Takes what is sent, by the detokenizers that are there; the test answers."""

    def __init__(self, *there: Identity) -> None:
        self.there, self.sent, self.full = list(there), list[tuple[Identity, Struct]](), False
        self.timers: list[Callable[[], None]] = []
        self.too_long = False
        self.in_hand: tuple[str, ...] = ()  # of whoever is lost
        self._news = asyncio.Event()

    def in_hand_of(self, peer: Identity, incarnation: Incarnation) -> tuple[str, ...]:
        return self.in_hand

    def peers(self, role: Role) -> list[Identity]:
        return self.there

    def send(self, peer: Identity, message: Struct) -> None:
        if self.full:
            raise LinkFull(peer)
        if self.too_long:
            raise MessageTooLong(peer, type(message).__name__, 101, 100)
        self.sent.append((peer, message))
        self._news.set()

    async def was_sent(self, count: int) -> None:
        """Until so many messages have left."""
        while len(self.sent) < count:
            self._news.clear()
            await self._news.wait()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self.timers.append(callback)


def silent(*there: Identity) -> tuple[Client, SilentMesh]:
    client = Client()
    stub = SilentMesh(*there)
    mesh: Any = stub
    client.mesh_client.mesh = mesh
    for peer in there:
        client.on_peer_up(peer, Incarnation(1))
    return client, stub


def died(client: Client, stub: SilentMesh, peer: Identity) -> None:
    stub.there = [other for other in stub.there if other != peer]
    client.on_peer_down(peer, Incarnation(1), "the process died")


def came(client: Client, stub: SilentMesh, peer: Identity) -> None:
    stub.there.append(peer)
    client.on_peer_up(peer, Incarnation(2))


def row(handle: Handle, start: int, tokens: list[int], text: str, end: bool = False) -> TextDeltas:
    finished = [Finished(0, FinishReason.LENGTH)] if end else []
    return TextDeltas(
        pack_i32([handle]), pack_i32([start]), pack_i32([len(tokens)]), pack_i32(tokens), [text], finished
    )


def last_submit(stub: SilentMesh) -> Submit:
    _, message = stub.sent[-1]
    assert isinstance(message, Submit)
    return message


def two_choices(client: Client) -> Iterator[Sent]:
    handles = (client.new_handle(), client.new_handle())
    submit = Submit(handles, (name_of("r", 0), name_of("r", 1)), TextPrompt("a"), SamplingParams(seed=40))
    yield Sent(submit, RequestOutput("r", "a", [], [CompletionOutput(0), CompletionOutput(1)]))


def test_each_choice_goes_on_after_its_tokens_when_its_detokenizer_dies() -> None:
    other = Identity(Role.DETOKENIZER, 1)

    async def run() -> None:
        client, stub = silent(DETOKENIZER)
        outputs = asyncio.ensure_future(client.run(two_choices(client), None))
        await stub.was_sent(1)
        first = last_submit(stub)
        client.on_message(DETOKENIZER, row(first.handles[1], 0, [7, 8], "xy"))
        came(client, stub, other)
        died(client, stub, DETOKENIZER)
        again = [message for peer, message in stub.sent[1:] if peer == other and isinstance(message, Submit)]
        assert [submit.request_ids for submit in again] == [(name_of("r", 0),), (name_of("r", 1),)]
        assert [submit.delivered for submit in again] == [b"", pack_i32([7, 8])]
        assert [submit.sampling.seed for submit in again] == [40, 41]
        assert [submit.attempt for submit in again] == [1, 1]
        client.on_message(DETOKENIZER, row(first.handles[1], 2, [66], "late", end=True))  # nobody's
        client.on_message(other, row(again[0].handles[0], 0, [5], "v", end=True))
        client.on_message(
            other, row(again[1].handles[0], 1, [8, 9], "??", end=True)
        )  # begins before the end of what is here
        client.on_message(other, row(again[1].handles[0], 3, [10], "!", end=True))
        assert stub.sent[-1] == (other, Attach(again[1].handles[0], name_of("r", 1), 2)), "a gap is asked for"
        client.on_message(other, row(again[1].handles[0], 2, [9, 10], "zu", end=True))
        (request,) = await outputs
        assert [(output.token_ids, output.text) for output in request.outputs] == [([5], "v"), ([7, 8, 9, 10], "xyzu")]

    asyncio.run(asyncio.wait_for(run(), 10))


def test_what_the_mesh_has_no_room_for_waits_until_something_ends() -> None:
    async def run() -> None:
        client, stub = silent(DETOKENIZER)
        outputs = asyncio.ensure_future(client.run(two_choices(client), None))
        await stub.was_sent(1)
        first, second = last_submit(stub).handles
        client.on_message(DETOKENIZER, Rejected((second,), ErrorKind.OVERLOADED, "8 requests are waiting already"))
        assert len(stub.sent) == 1, "not at once"
        client.on_message(DETOKENIZER, row(first, 0, [5], "v", end=True))
        again = last_submit(stub)
        assert (again.handles, again.request_ids) == ((second,), (name_of("r", 1),))
        assert (again.sampling.seed, again.attempt, again.delivered) == (41, 0, b"")
        client.on_message(DETOKENIZER, Rejected((second,), ErrorKind.OVERLOADED, "8 requests are waiting already"))
        assert len(stub.sent) == 2, "nothing has ended since"
        stub.timers.pop()()
        assert len(stub.sent) == 3, "nothing of ours runs: it is tried now and then"
        client.on_message(DETOKENIZER, row(second, 0, [6], "w", end=True))
        (request,) = await outputs
        assert [output.token_ids for output in request.outputs] == [[5], [6]]

    asyncio.run(asyncio.wait_for(run(), 10))


def test_another_refusal_is_an_error() -> None:
    async def run() -> None:
        client, stub = silent(DETOKENIZER)
        outputs = asyncio.ensure_future(client.run(asks(client, 1), None))
        await stub.was_sent(1)
        client.on_message(DETOKENIZER, Rejected(last_submit(stub).handles, ErrorKind.INVALID, "too long", "prompt"))
        with pytest.raises(ValueError, match="prompt: too long"):
            await outputs

    asyncio.run(asyncio.wait_for(run(), 10))


def test_what_no_frame_holds_is_an_error() -> None:
    async def run() -> None:
        client, stub = silent(DETOKENIZER)
        stub.too_long = True
        with pytest.raises(ValueError, match="prompt: a message of 101 bytes is too long"):
            await client.run(asks(client, 1), None)
        with pytest.raises(ValueError, match="too long for the mesh"):
            await client.tokenize([TextPrompt("a")])

    asyncio.run(asyncio.wait_for(run(), 10))


def test_what_no_detokenizer_takes_waits() -> None:
    async def run() -> None:
        client, stub = silent()
        outputs = asyncio.ensure_future(client.run(asks(client, 2), None))
        question = asyncio.ensure_future(client.tokenize([TextPrompt("a")]))
        await asyncio.sleep(0.01)
        assert not stub.sent
        stub.full = True
        came(client, stub, DETOKENIZER)
        assert not stub.sent, "its queue is full"
        stub.full = False
        stub.timers[-1]()
        asked = {type(message): message for _, message in stub.sent}
        assert len(stub.sent) == 3
        died(client, stub, DETOKENIZER)
        came(client, stub, DETOKENIZER)
        assert len(stub.sent) == 6
        tokenize = asked[Tokenize]
        assert isinstance(tokenize, Tokenize)
        client.on_message(DETOKENIZER, TokenizeReply(tokenize.handle, pack_i32([3])))
        assert await question == [[3]]
        for _, message in stub.sent[3:]:
            if isinstance(message, Submit):
                client.on_message(DETOKENIZER, ended(message.handles[0]))
        assert all(output.outputs[0].token_ids == [7] for output in await outputs)

    asyncio.run(asyncio.wait_for(run(), 10))


@pytest.mark.parametrize("most", [MAX_DEATHS, 3])
def test_deaths_without_a_token_between_them_end_a_request(most: int) -> None:
    async def run() -> None:
        client, stub = silent(DETOKENIZER)
        client.mesh_client.set_max_deaths(most)
        outputs = asyncio.ensure_future(client.run(asks(client, 1), None))
        await stub.was_sent(1)
        for _ in range(most):
            died(client, stub, DETOKENIZER)
            came(client, stub, DETOKENIZER)
        with pytest.raises(ValueError, match=f"died {most} times"):
            await outputs
        assert len(stub.sent) == most

    asyncio.run(asyncio.wait_for(run(), 10))


def test_deaths_over_minutes_end_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        client, stub = silent(DETOKENIZER)
        outputs = asyncio.ensure_future(client.run(asks(client, 1), None))
        await stub.was_sent(1)
        for number in range(3 * MAX_DEATHS):
            monkeypatch.setattr(time, "monotonic", lambda at=number * WINDOW_S / 4: at)
            died(client, stub, DETOKENIZER)
            came(client, stub, DETOKENIZER)
        monkeypatch.undo()
        client.on_message(DETOKENIZER, ended(last_submit(stub).handles[0]))
        assert [request.outputs[0].token_ids for request in await outputs] == [[7]]

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_question_that_kills_detokenizers_is_given_up() -> None:
    async def run() -> None:
        client, stub = silent(DETOKENIZER)
        questions = [asyncio.ensure_future(client.tokenize([TextPrompt("a")])) for _ in range(2)]
        await stub.was_sent(2)
        for _ in range(MAX_DEATHS):
            died(client, stub, DETOKENIZER)
            came(client, stub, DETOKENIZER)
        for question in questions:
            with pytest.raises(ValueError, match="its detokenizer died 5 times within 60 s"):
                await question
        assert len(stub.sent) == 2 * MAX_DEATHS

    asyncio.run(asyncio.wait_for(run(), 10))


async def test_what_nobody_waits_for_is_ended() -> None:
    client, stub = silent(DETOKENIZER)
    running = asyncio.ensure_future(client.run(asks(client, 1), None))
    await asyncio.wait_for(stub.was_sent(1), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stub.sent[-1] == (DETOKENIZER, Abort((name_of("r0", 0),)))
