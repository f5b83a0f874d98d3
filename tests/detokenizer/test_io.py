"""The detokenizer's threads: every prompt of a burst is encoded once, and what is wrong with one is said of it alone."""

import asyncio
import threading
from array import array
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from stub_mesh import LIFE, StubMesh

from meshlm.detokenizer.encode import Encoder
from meshlm.detokenizer.grammar_threads import GrammarSandbox
from meshlm.detokenizer.io import DetokenizerApp
from meshlm.protocol.edges.admit import Admit
from meshlm.protocol.edges.text import Prompt, Rejected, Submit, TextPrompt, TokenPrompt
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, ErrorKind, Handle, Identity, RequestId, Role
from meshlm.runtime.errors import MessageTooLong
from meshlm.runtime.model_files import tokenizer_files


class Panic(BaseException):
    """As pyo3's PanicException."""


FRONTEND = Identity(Role.FRONTEND)


class AdmittingMesh(StubMesh):
    """`all_answered` when so many requests were admitted or refused."""

    def __init__(self, tokenizer: Path, flush: Callable[[], None], expected: int) -> None:
        super().__init__(tokenizer, flush)
        self.admitted: dict[str, list[int]] = {}
        self.refused: list[Rejected] = []
        self.all_answered = asyncio.Event()
        self.too_long = ""  # the name of a request
        self._expected = expected

    def send(self, to: Identity, message: Struct) -> None:
        match message:
            case Admit() if message.work.request_id == self.too_long:
                raise MessageTooLong(to, "Admit", 101, 100)
            case Admit():
                assert message.work.request_id not in self.admitted
                self.admitted[message.work.request_id] = ints(message.work.prompt_token_ids)
            case Rejected():
                self.refused.append(message)
        if len(self.admitted) + len(self.refused) == self._expected:
            self.all_answered.set()


def test_a_burst_of_prompts(smollm2: Path) -> None:
    encode = tokenizer_files.load(smollm2).tokenizer.encode
    prompts: list[Prompt] = [TextPrompt(f"prompt number {number}") for number in range(50)]
    expected = {f"r{number}": encode(f"prompt number {number}").ids for number in range(50)}
    prompts[17], prompts[30] = TextPrompt("\ud800"), TokenPrompt(pack_i32([7, 8, 9]))
    del expected["r17"]
    expected["r30"] = [7, 8, 9]

    async def run() -> AdmittingMesh:
        app = DetokenizerApp()
        mesh = AdmittingMesh(smollm2, app.flush, len(prompts))
        stub: Any = mesh
        await app.start(stub)
        app.on_peer_up(COORDINATOR, LIFE)
        for number, prompt in enumerate(prompts):
            submit = Submit((Handle(number),), (RequestId(f"r{number}"),), prompt, SamplingParams(), max_tokens=5)
            app.on_message(FRONTEND, submit)
            if number % 20 == 19:
                app.flush()  # as after each batch of messages
        assert list(mesh.admitted) == ["r30"], "token ids need no thread"
        app.flush()
        await asyncio.wait_for(mesh.all_answered.wait(), 30)
        await app.stop()
        return mesh

    mesh = asyncio.run(run())
    assert mesh.admitted == expected
    (refused,) = mesh.refused
    assert refused.handles == (Handle(17),)
    assert mesh.logged == ["the tokenizer failed"]
    assert (refused.param, refused.message[:28]) == ("prompt", "the prompt cannot be encoded")


async def test_a_panic_of_the_tokenizer_is_answered(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no Exception, and must not take with it what the same thread encoded before."""
    real = Encoder.encode

    def encode(self: Encoder, prompt: Prompt) -> "array[int]":
        if prompt == TextPrompt("panic"):
            raise Panic("called `Option::unwrap()` on a `None` value")
        return real(self, prompt)

    monkeypatch.setattr(Encoder, "encode", encode)
    app = DetokenizerApp()
    mesh = AdmittingMesh(smollm2, app.flush, 3)
    stub: Any = mesh
    await app.start(stub)
    app.on_peer_up(COORDINATOR, LIFE)
    for number, text in enumerate(("one", "panic", "two")):
        submit = Submit((Handle(number),), (RequestId(f"r{number}"),), TextPrompt(text), SamplingParams(), max_tokens=5)
        app.on_message(FRONTEND, submit)
    app.flush()
    await asyncio.wait_for(mesh.all_answered.wait(), 30)
    await app.stop()
    assert mesh.admitted.keys() == {"r0", "r2"}
    assert [refused.handles for refused in mesh.refused] == [(Handle(1),)]
    assert mesh.logged == ["the tokenizer failed"]


async def test_a_request_that_no_frame_holds_is_refused_alone(smollm2: Path) -> None:
    app = DetokenizerApp()
    mesh = AdmittingMesh(smollm2, app.flush, 3)
    mesh.too_long = "r1"
    stub: Any = mesh
    await app.start(stub)
    app.on_peer_up(COORDINATOR, LIFE)
    for number in range(3):
        prompt = TokenPrompt(pack_i32([7, 8, 9]))
        submit = Submit((Handle(number),), (RequestId(f"r{number}"),), prompt, SamplingParams(), max_tokens=5)
        app.on_message(FRONTEND, submit)
    await asyncio.wait_for(mesh.all_answered.wait(), 30)
    await app.stop()
    assert mesh.admitted.keys() == {"r0", "r2"}
    (refused,) = mesh.refused
    assert (refused.handles, refused.kind) == ((Handle(1),), ErrorKind.INTERNAL)
    assert "too long for the mesh" in refused.message


async def test_what_many_prompts_become_leaves_turns_of_the_loop_to_others(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four prompts that a thread hands over together, of fifty choices each."""
    monkeypatch.setattr("meshlm.detokenizer.io.ADMIT_FOR_S", 0.0, raising=False)
    app = DetokenizerApp()
    mesh = AdmittingMesh(smollm2, app.flush, 200)
    stub: Any = mesh
    await app.start(stub)
    app.on_peer_up(COORDINATOR, LIFE)
    for number in range(4):
        names = tuple(RequestId(f"r{number}-{choice}") for choice in range(50))
        handles = tuple(Handle(50 * number + choice) for choice in range(50))
        app.on_message(FRONTEND, Submit(handles, names, TextPrompt(f"{number}"), SamplingParams(), max_tokens=5))
    app._encode_waiting()
    seen = []
    async with asyncio.timeout(30):
        while not mesh.all_answered.is_set():
            await asyncio.sleep(0)
            seen.append(len(mesh.admitted))
    await app.stop()
    assert seen[-1] == 200
    assert max(later - before for before, later in pairwise([0, *seen])) <= 16, (
        "choices of one prompt wait for each other"
    )


async def test_a_new_grammar_holds_up_nobody(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled in a thread of its own; what is no grammar, and a panic of the library's, is answered with its field."""
    released, real = threading.Event(), GrammarSandbox.translate

    def translate(self: GrammarSandbox, grammar: Grammar) -> tuple[str, str]:
        if grammar.text == "slow":
            assert released.wait(30)
        if grammar.text == "panic":
            raise Panic("called `Option::unwrap()` on a `None` value")
        return real(self, grammar)

    monkeypatch.setattr(GrammarSandbox, "translate", translate)
    app = DetokenizerApp()
    mesh = AdmittingMesh(smollm2, app.flush, 2)
    stub: Any = mesh
    await app.start(stub)
    app.on_peer_up(COORDINATOR, LIFE)

    def ask(number: int, text: str) -> None:
        extras = (Grammar(GrammarKind.REGEX, text, "guided_regex"),) if text else ()
        prompt = TextPrompt("one") if number % 2 else TokenPrompt(pack_i32([7, 8, 9]))
        names = ((Handle(number),), (RequestId(f"r{number}"),))
        app.on_message(FRONTEND, Submit(*names, prompt, SamplingParams(), max_tokens=5, extras=extras))
        app.flush()

    ask(0, "slow")
    ask(1, "")
    ask(2, "")
    await asyncio.wait_for(mesh.all_answered.wait(), 30)
    assert mesh.admitted.keys() == {"r1", "r2"}
    mesh.all_answered.clear()
    mesh._expected = 6
    released.set()
    ask(3, "(a")
    ask(4, "panic")
    ask(5, "a+")
    await asyncio.wait_for(mesh.all_answered.wait(), 30)
    await app.stop()
    assert mesh.admitted.keys() == {"r0", "r1", "r2", "r5"}
    assert {(one.handles[0], one.param) for one in mesh.refused} == {(3, "guided_regex"), (4, "guided_regex")}
