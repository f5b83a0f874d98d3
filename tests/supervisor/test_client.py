"""The Python API's client: prompts leave one by one while answers come back, and none is left behind when one cannot be made."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import Struct

from meshlm.protocol.columns import pack_i32
from meshlm.protocol.control_edge import MeshStats
from meshlm.protocol.ids import FinishReason, Handle, Identity, Incarnation, Role
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.text_edge import Abort, Finished, Submit, TextDeltas, TextPrompt, TokenizeReply
from meshlm.supervisor import client as client_module
from meshlm.supervisor.client import SENDS_A_TURN, Client, name_of
from meshlm.supervisor.outputs import CompletionOutput, RequestOutput

DETOKENIZER = Identity(Role.DETOKENIZER)


class StubMesh:
    """Answers each Submit with one token and the end: at once, or from number `later` on a moment later."""

    def __init__(self, client: Client, later: int) -> None:
        self.sent: list[Struct] = []
        self.there, self.answers = [DETOKENIZER], True
        self._news = asyncio.Event()
        self._client, self._later = client, later

    def peers(self, role: Role) -> list[Identity]:
        return self.there

    def send(self, peer: Identity, message: Struct) -> None:
        self.sent.append(message)
        self._news.set()
        if isinstance(message, Submit) and self.answers:
            answer = ended(message.handles[0])
            if len(self.sent) <= self._later:
                self._client.on_message(DETOKENIZER, answer)
            else:
                asyncio.get_running_loop().call_later(0.02, self._client.on_message, DETOKENIZER, answer)

    async def asked(self, count: int) -> None:
        while len(self.sent) < count:
            self._news.clear()
            await self._news.wait()


def ended(handle: Handle) -> TextDeltas:
    return TextDeltas(pack_i32([handle]), pack_i32([0]), b"", pack_i32([7]), ["x"], [Finished(0, FinishReason.LENGTH)])


def asks(client: Client, count: int) -> Iterator[tuple[Submit, RequestOutput]]:
    for number in range(count):
        name, prompt = f"r{number}", TextPrompt("a")
        submit = Submit((client.new_handle(),), (name_of(name, 0),), prompt, SamplingParams())
        yield submit, RequestOutput(name, "a", [], [CompletionOutput(0)])


def connected(later: int) -> tuple[Client, StubMesh]:
    client = Client()
    stub = StubMesh(client, later)
    mesh: Any = stub
    client.mesh = mesh
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


def test_a_prompt_that_cannot_be_made_ends_those_before_it() -> None:
    async def run() -> None:
        client, stub = connected(0)

        def broken() -> Iterator[tuple[Submit, RequestOutput]]:
            yield from asks(client, 3)
            raise ValueError("no prompt")

        with pytest.raises(ValueError, match="no prompt"):
            await client.run(broken(), None)
        assert stub.sent[-1] == Abort((name_of("r0", 0), name_of("r1", 0), name_of("r2", 0)))
        (one,) = await asyncio.wait_for(client.run(asks(client, 1), None), 30)
        assert one.finished  # the answers to the three came nevertheless, and before

    asyncio.run(run())


async def test_the_death_of_a_detokenizer_ends_what_it_was_asked() -> None:
    """Nobody would answer any more; what others have of it is not computed for nobody."""
    client, stub = connected(1000)
    stub.answers = False
    running = asyncio.ensure_future(client.run(asks(client, 2), None))
    ids = asyncio.ensure_future(client.tokenize([TextPrompt("a")]))
    text = asyncio.ensure_future(client.detokenize([7]))
    await asyncio.wait_for(stub.asked(4), 30)
    client.on_peer_down(DETOKENIZER, Incarnation(1), "the process died")
    for asked in (running, ids, text):
        with pytest.raises(ValueError, match="detokenizer/0: the process died"):
            await asyncio.wait_for(asked, 30)
    assert stub.sent[-1] == Abort((name_of("r0", 0), name_of("r1", 0)))
    late = TokenizeReply(Handle(3))
    client.on_message(DETOKENIZER, late)  # of nobody's question


async def test_a_question_waits_for_a_detokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    client, stub = connected(1000)
    stub.there = []
    client.on_message(Identity(Role.COORDINATOR), MeshStats(True))
    running = asyncio.ensure_future(client.run(asks(client, 1), None))
    await asyncio.sleep(0)
    assert not stub.sent
    stub.there = [DETOKENIZER]
    client.on_peer_up(DETOKENIZER, Incarnation(2))
    (one,) = await asyncio.wait_for(running, 30)
    assert one.finished
    stub.there = []
    monkeypatch.setattr(client_module, "HOLD_S", 0.01)
    with pytest.raises(ValueError, match="no detokenizer was there"):
        await asyncio.wait_for(client.tokenize([TextPrompt("a")]), 30)


async def test_what_nobody_waits_for_is_ended() -> None:
    client, stub = connected(1000)
    stub.answers = False
    running = asyncio.ensure_future(client.run(asks(client, 1), None))
    await asyncio.wait_for(stub.asked(1), 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stub.sent[-1] == Abort((name_of("r0", 0),))
