"""Grammars that end the process in which they are compiled, or keep it: refused by what they take, while others are compiled."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from grammar_bombs import GRAMMARS, PATTERNS, SCHEMAS, SLOW

from meshlm.detokenizer import grammar_threads
from meshlm.detokenizer.grammar_cache import GrammarCache, Unknown
from meshlm.detokenizer.grammar_threads import GrammarSandbox, GrammarThreads
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError
from meshlm.runtime.sandbox.limits import ChildDied, Limit
from meshlm.runtime.sandbox.sandbox import NoChild, Sandbox

pytestmark = pytest.mark.model
DIES = {
    "references of objects, 1,000",
    "references of objects, 1,200",
    "references, 3,000",
    "rules",
    "terminals",
    "schema",
}
SLOW_ONES = {"slow", "schemas"}


@pytest.fixture(scope="module")
def sandbox(smollm2: Path) -> Iterator[GrammarSandbox]:
    resolved: Any = SimpleNamespace(
        tokenizer_path=str(smollm2), spec=SimpleNamespace(vocab_size=49152), eos_token_ids=(2,)
    )
    made = GrammarSandbox(resolved, lambda what: None)
    yield made
    made.close()


def of_schema(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), "field.part")


BOMBS = [
    *(pytest.param(of_schema(schema), id=name) for name, schema in SCHEMAS.items()),
    *(pytest.param(Grammar(GrammarKind.REGEX, text, "field.part"), id=name) for name, text in PATTERNS.items()),
    *(pytest.param(Grammar(GrammarKind.GRAMMAR, text, "field.part"), id=name) for name, text in GRAMMARS.items()),
]


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_refused_by_its_limit_or_compiles(
    sandbox: GrammarSandbox, bomb: Grammar, request: pytest.FixtureRequest
) -> None:
    cache, name = GrammarCache(sandbox.translate), request.node.callspec.id
    told = "MiB of stack" if name in DIES else "more than 2 s of CPU time to compile" if name in SLOW_ONES else ""
    refused = None
    try:
        assert cache.compile(bomb).kind is GrammarKind.COMPILED
        assert not told
    except RequestError as error:
        refused = error
    if refused is not None:
        assert (refused.kind, refused.param) == (ErrorKind.INVALID, "field")
        assert told in refused.message
    if name in SLOW_ONES:
        assert cache.known(bomb) is None  # the same grammar may pass on a faster host
    assert cache.compile(of_schema({"type": "object"})).text


def test_others_are_compiled_while_slow_ones_are(sandbox: GrammarSandbox) -> None:
    """Two of them stopped every other."""
    cache = GrammarCache(sandbox.translate)
    ended: list[RequestError] = []

    def slow(number: int) -> None:
        with pytest.raises(RequestError) as refused:
            cache.compile(of_schema({**SLOW, "multipleOf": 999_983 + 2 * number}))
        ended.append(refused.value)

    threads = [threading.Thread(target=slow, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for number in range(20):
        assert cache.compile(of_schema({"type": "object", "maxProperties": number})).text
    assert not ended, "it waited for the slow ones"
    for thread in threads:
        thread.join()
    assert {error.kind for error in ended} == {ErrorKind.INVALID}


@pytest.mark.parametrize(
    ("died", "kind", "is_known"),
    [
        (ChildDied(Limit.STACK, "it is nested too deeply"), ErrorKind.INVALID, True),
        (ChildDied(Limit.MEMORY, "it takes more than 1 MiB"), ErrorKind.INVALID, True),
        (ChildDied(Limit.CPU, "it takes more than 2 s"), ErrorKind.INVALID, False),
        (ChildDied(Limit.WALL, "it was not done"), ErrorKind.OVERLOADED, False),
        (ChildDied(Limit.KILLED, "signal 9"), ErrorKind.OVERLOADED, False),
        (NoChild("no process could be started for it"), ErrorKind.OVERLOADED, False),
    ],
)
def test_only_what_the_grammar_decides_is_remembered(
    sandbox: GrammarSandbox, monkeypatch: pytest.MonkeyPatch, died: ChildDied | NoChild, kind: ErrorKind, is_known: bool
) -> None:
    """A busy host, or one without memory, refuses nothing for good: the client is told to try again."""

    def run(*arguments: object) -> bytes:
        raise died

    cache, asked = GrammarCache(sandbox.translate), of_schema({"type": "null"})
    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "run", run)
        with pytest.raises(RequestError, match=f"^field.part: .*{died}") as refused:
            cache.compile(asked)
    assert refused.value.kind is kind
    if is_known:
        with pytest.raises(RequestError, match=str(died)):
            cache.compile(asked)
    else:
        assert cache.compile(asked).text


def test_what_is_remembered_has_a_bound() -> None:
    cache = GrammarCache(lambda grammar: ("x" * (1 << 20), ""))
    asked = [of_schema({"const": number}) for number in range(40)]
    for each in asked:
        cache.compile(each)
    assert sum(cache.known(each) is not None for each in asked) == 31
    with pytest.raises(RequestError) as busy:
        GrammarCache(_busy).compile(asked[0])
    assert busy.value.kind is ErrorKind.OVERLOADED


def test_many_new_ones_at_once_wait_and_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a burst of clients brings them; beyond MAX_WAITING a client is told to try again."""
    monkeypatch.setattr(grammar_threads, "MAX_WAITING", 300)
    begin, ended = threading.Event(), threading.Semaphore(0)
    told: list[Grammar | RequestError] = []

    def translate(grammar: Grammar) -> tuple[str, str]:
        assert begin.wait(30)
        return grammar.text, ""

    def done(found: Grammar | RequestError) -> None:
        told.append(found)
        ended.release()

    threads = GrammarThreads(translate, 9)
    for number in range(301):
        threads.submit(of_schema({"const": number}), lambda: True, done)
    (refused,) = told
    assert isinstance(refused, RequestError)
    assert (refused.kind, refused.param) == (ErrorKind.OVERLOADED, "field")
    begin.set()
    for _ in range(301):
        assert ended.acquire(timeout=30)
    assert sum(isinstance(found, Grammar) for found in told) == 300
    threads.submit(of_schema({"const": "again"}), lambda: True, done)
    assert ended.acquire(timeout=30)
    assert isinstance(told[-1], Grammar)
    threads.close()


def _busy(grammar: Grammar) -> tuple[str, str]:
    raise Unknown(ErrorKind.OVERLOADED, grammar_threads.BUSY)


def test_this_process_has_not_the_library(sandbox: GrammarSandbox) -> None:
    """What a detokenizer imports, in a process of its own: llguidance comes with the children alone."""
    script = "import sys, meshlm.detokenizer.io; assert not {'llguidance', 'numpy'} & set(sys.modules), 1"
    subprocess.run([sys.executable, "-P", "-c", script], check=True, env={**os.environ})
    answer = sandbox._sandbox.run(msgspec.msgpack.encode(of_schema({})), grammar_threads.LIMITS, 60.0)
    assert msgspec.msgpack.decode(answer, type=tuple[str, str])[1] == ""
