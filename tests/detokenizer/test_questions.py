"""What is asked at /tokenize and /detokenize waits apart from requests, and what nobody waits for any more is dropped."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from stub_mesh import LIFE, StubMesh

from meshlm.detokenizer import io, replies
from meshlm.detokenizer.io import DetokenizerApp
from meshlm.detokenizer.questions import FULL, LARGE_BYTES, Questions
from meshlm.protocol.edges.admit import Admit
from meshlm.protocol.edges.text import (
    Abort,
    Cancel,
    Detokenize,
    DetokenizeReply,
    Rejected,
    Submit,
    TextPrompt,
    Tokenize,
    TokenizeReply,
)
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, ErrorKind, Handle, Identity, RequestId, Role

F0, F1 = Identity(Role.FRONTEND, 0), Identity(Role.FRONTEND, 1)
LARGE = "x" * (LARGE_BYTES + 1)
LIMIT_S = 30


def question(handle: int, text: str = "a") -> Tokenize:
    return Tokenize(Handle(handle), TextPrompt(text))


def order(questions: Questions) -> list[int]:
    found: list[int] = []
    while (one := questions.next_question()) is not None:
        found.append(one.message.handle)
        questions.check()
    return found


def test_small_ones_wait_for_one_large_one_at_most() -> None:
    questions = Questions()
    for handle in range(4):
        questions.add(F0, question(handle, LARGE))
    for handle in range(4, 8):
        questions.add(F1, question(handle))
    assert order(questions) == [4, 0, 5, 1, 6, 2, 7, 3]


def test_too_many_bytes_are_refused_and_one_is_always_taken() -> None:
    questions = Questions(max_bytes=10)
    assert questions.add(F0, question(1, "x" * 100)) is None
    assert questions.add(F0, question(2)) == TokenizeReply(Handle(2), error=FULL, kind=ErrorKind.OVERLOADED)
    refusal = DetokenizeReply(Handle(3), error=FULL, kind=ErrorKind.OVERLOADED)
    assert questions.add(F0, Detokenize(Handle(3), pack_i32([1]))) == refusal
    assert order(questions) == [1]
    assert questions.add(F0, question(4)) is None


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "cancel", "lost"]), st.integers(0, 5), st.booleans())))
def test_bytes_are_those_that_wait(steps: list[tuple[str, int, bool]]) -> None:
    questions = Questions()
    waiting: set[tuple[Identity, int]] = set()
    for number, (step, handle, other) in enumerate(steps):
        sender = F1 if other else F0
        match step:
            case "add":
                questions.add(sender, question(number + 10, "x" * handle if handle < 5 else LARGE))
                waiting.add((sender, number + 10))
            case "take":
                one = questions.next_question()
                assert (one is None) == (not waiting)
                waiting.discard((one.sender, one.message.handle) if one else (sender, -1))
            case "cancel":
                questions.cancel(sender, Handle(handle + 10))
                waiting.discard((sender, handle + 10))
            case "lost":
                questions.lost(sender)
                waiting = {key for key in waiting if key[0] != sender}
        questions.check()
        assert len(questions) == len(waiting)


class Mesh(StubMesh):
    """`sent` in order."""

    def __init__(self, tokenizer: Path, app: DetokenizerApp) -> None:
        super().__init__(tokenizer, app.flush)
        self.sent: asyncio.Queue[Struct] = asyncio.Queue()

    def send(self, to: Identity, message: Struct) -> None:
        self.sent.put_nowait(message)

    async def next(self, kind: type[Struct]) -> Any:
        while True:
            message = await asyncio.wait_for(self.sent.get(), LIMIT_S)
            if isinstance(message, kind):
                return message


async def started(tokenizer: Path) -> tuple[DetokenizerApp, Mesh]:
    app = DetokenizerApp()
    mesh = Mesh(tokenizer, app)
    stub: Any = mesh
    await app.start(stub)
    app.on_peer_up(COORDINATOR, LIFE)
    return app, mesh


def submit(number: int, text: str) -> Submit:
    return Submit((Handle(number),), (RequestId(f"r{number}"),), TextPrompt(text), SamplingParams(), max_tokens=5)


class Held:
    """In the place of a function that a thread calls: it waits for `go`."""

    def __init__(self, real: Any) -> None:
        self._real, self.go, self.asked = real, threading.Event(), [0]

    def __call__(self, *arguments: Any) -> Any:
        self.asked.append(1)
        assert self.go.wait(LIMIT_S)
        return self._real(*arguments)


async def test_questions_are_answered(smollm2: Path) -> None:
    app, mesh = await started(smollm2)
    app.on_message(F0, Tokenize(Handle(1), TextPrompt("Hello you"), True))
    said = await mesh.next(TokenizeReply)
    assert len(said.strings) == len(ints(said.token_ids)) == 2
    app.on_message(F0, Detokenize(Handle(2), said.token_ids))
    assert await mesh.next(DetokenizeReply) == DetokenizeReply(Handle(2), "Hello you")
    app.on_message(F0, Detokenize(Handle(3), pack_i32([1, 49152])))
    refused = await mesh.next(DetokenizeReply)
    assert (refused.kind, refused.param) == (ErrorKind.INVALID, "tokens")
    assert "49152 is outside the vocabulary" in refused.error
    await app.stop()


async def test_prompts_do_not_wait_for_questions_nor_questions_for_the_abandoned(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "answer", held := Held(replies.answer))
    app, mesh = await started(smollm2)
    for handle in range(60):
        app.on_message(F0, question(handle, LARGE))
    app.on_message(F1, question(100))
    app.on_message(F0, submit(1, "a prompt"))
    app.flush()
    assert (await mesh.next(Admit)).work.request_id == "r1", "while the first question is answered"
    for handle in range(60):
        app.on_message(F0, Cancel(Handle(handle)))
    held.go.set()
    assert [(await mesh.next(TokenizeReply)).handle for _ in range(2)] == [0, 100]
    assert sum(held.asked) == 2, "what had not begun was dropped"
    await app.stop()


async def test_small_prompts_do_not_wait_for_large_ones(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "LARGE_BYTES", 100)
    app, mesh = await started(smollm2)
    assert app._encoder is not None
    real, held = app._encoder.encode, threading.Event()

    def encode(prompt: Any) -> Any:
        assert len(prompt.text) <= 100 or held.wait(LIMIT_S)
        return real(prompt)

    monkeypatch.setattr(app._encoder, "encode", encode)
    for number in range(10):
        app.on_message(F0, submit(number, "x " * 60))
    app.on_message(F0, submit(10, "small"))
    app.flush()
    assert (await mesh.next(Admit)).work.request_id == "r10"
    app.on_message(F0, Abort(tuple(RequestId(f"r{number}") for number in range(1, 9))))
    held.set()
    assert {(await mesh.next(Admit)).work.request_id for _ in range(2)} == {"r0", "r9"}
    assert app._waiting_bytes == 0
    await app.stop()


async def test_too_many_bytes_of_prompts_are_refused(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "MAX_WAITING_BYTES", 10)
    app, mesh = await started(smollm2)
    app.on_message(F0, submit(1, "one is always taken"))
    app.on_message(F0, submit(2, "too much"))
    refused = await mesh.next(Rejected)
    assert (refused.handles, refused.kind) == ((Handle(2),), ErrorKind.OVERLOADED)
    app.flush()
    assert (await mesh.next(Admit)).work.request_id == "r1"
    await app.stop()
