"""A request with a grammar waits until its workers have compiled it, and nobody waits for it."""

from typing import Any

import pytest
from bench import DETOKENIZER, LIFE, WORKER, Bench, limits, reference

from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.edges.step import ExtraReady, PrepareExtra, RowFailed, StepResult
from meshlm.protocol.grammar import Grammar, GrammarKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, ErrorKind, FinishReason, Handle, RequestId
from meshlm.runtime.process.events import Received, Send
from meshlm.scheduler_proc import preparations

PROMPT = [5, 6, 7, 8, 9]


def text_of(prepare: PrepareExtra) -> str:
    assert isinstance(prepare.extra, Grammar)
    return prepare.extra.text


class GrammarBench(Bench):
    """Notes what the worker is asked to compile."""

    def take(self, sends: list[Send]) -> None:
        self.asked = [*getattr(self, "asked", []), *(s.message for s in sends if isinstance(s.message, PrepareExtra))]
        super().take(sends)

    def give(self, handle: int, text: str = "", max_tokens: int = 4, **params: Any) -> None:
        extras = (Grammar(GrammarKind.COMPILED, text, "guided_regex.x"),) if text else ()
        sampling = SamplingParams(max_tokens=max_tokens, **params)
        ids, arrival_s = pack_i32(PROMPT), float(handle)
        work = EngineRequest(RequestId(f"r{handle}"), Handle(handle), ids, sampling, arrival_s=arrival_s, extras=extras)
        self.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))

    def ready(self, ask: PrepareExtra, failed: RowFailed | None = None) -> None:
        self.event(Received(WORKER, LIFE, ExtraReady(ask.session, ask.number, failed)))


def test_it_waits_and_others_pass() -> None:
    bench = GrammarBench(limits(), 16, 4)
    bench.give(1, "a")
    bench.give(2)
    while bench.plans:
        bench.step()
    assert bench.ended == {2: FinishReason.LENGTH}
    (ask,) = bench.asked
    assert text_of(ask) == "a"
    bench.ready(ask)
    bench.finish()
    assert bench.tokens[1] == reference(PROMPT, 4)
    assert not bench.core.table.preparations._by_extra


def test_requests_share_a_grammar_and_the_last_one_takes_it_along() -> None:
    bench = GrammarBench(limits(), 16, 4)
    bench.give(1, "a")
    bench.give(2, "a")
    assert len(bench.asked) == 1
    bench.ready(bench.asked[0])
    bench.give(3, "a")
    bench.finish()
    assert len(bench.asked) == 1
    bench.give(4, "a")
    assert len(bench.asked) == 2
    assert bench.asked[1].number != bench.asked[0].number
    bench.ready(bench.asked[0])  # late, and of nobody
    assert not bench.plans
    bench.ready(bench.asked[1])
    bench.finish()
    assert bench.tokens[4] == reference(PROMPT, 4)


def test_what_cannot_be_compiled_ends_by_its_field() -> None:
    bench = GrammarBench(limits(), 16, 4)
    bench.give(1, "bad")
    bench.give(2, "bad")
    bench.ready(bench.asked[0], RowFailed("no text fits it"))
    assert bench.refused == dict.fromkeys((1, 2), "guided_regex: guided_regex.x: no text fits it")
    assert bench.error_kinds == dict.fromkeys((1, 2), ErrorKind.INVALID)
    assert not bench.core.requests


def test_a_host_that_is_busy_is_no_fault_of_the_grammar() -> None:
    """Its client is to try again (503), and nothing of the grammar is kept."""
    bench = GrammarBench(limits(), 16, 4)
    bench.give(1, "a")
    bench.ready(bench.asked[0], RowFailed("it was not done; try again", ErrorKind.OVERLOADED))
    assert bench.refused == {1: "guided_regex: guided_regex.x: it was not done; try again"}
    assert bench.error_kinds == {1: ErrorKind.OVERLOADED}
    assert not bench.core.requests
    bench.give(2, "a")
    bench.ready(bench.asked[1])
    bench.finish()
    assert bench.tokens[2] == reference(PROMPT, 4)


@pytest.mark.parametrize("num_steps", range(4))
def test_a_new_worker_is_asked_again(num_steps: int) -> None:
    """Its predecessor's answer counts no more, and the request goes on behind the tokens that it has."""
    bench = GrammarBench(limits(), 16, 4)
    bench.give(1, "a")
    bench.ready(bench.asked[0])
    for _ in range(num_steps):
        bench.step()
    bench.lose_worker()
    assert [text_of(ask) for ask in bench.asked] == ["a", "a"]
    assert bench.asked[0].session < bench.asked[1].session
    assert not bench.plans
    bench.ready(bench.asked[0])
    assert not bench.plans
    bench.ready(bench.asked[1])
    bench.finish()
    assert bench.tokens[1] == reference(PROMPT, 4)


def test_a_burst_of_grammars_leaves_room_on_the_link() -> None:
    bench = GrammarBench(limits(), 64, 4)
    for handle in range(3 * preparations.MAX_ASKED):
        bench.give(handle, f"grammar {handle}")
    assert len(bench.asked) == preparations.MAX_ASKED
    for ask in bench.asked[:5]:
        bench.ready(ask)
    assert len(bench.asked) == preparations.MAX_ASKED + 5
    at = 5
    while at < len(bench.asked):
        bench.ready(bench.asked[at])
        at += 1
    bench.finish()
    assert len(bench.ended) == at == 3 * preparations.MAX_ASKED


def test_a_row_that_fails_ends_alone() -> None:
    bench = GrammarBench(limits(), 16, 4)
    bench.give(1, "a")
    bench.give(2)
    bench.ready(bench.asked[0])
    while 1 not in (handles := [request.handle for request in bench.core.inflight[0].batch]):
        bench.step()
    plan, place = bench.plans.popleft(), handles.index(Handle(1))
    result = bench.model.run(plan)
    failed = StepResult(
        result.session, result.step, result.token_ids, done_ns=1, failed={place: RowFailed("no token is left")}
    )
    before = len(bench.tokens.get(1, []))
    bench.event(Received(WORKER, LIFE, failed))
    assert bench.refused == {1: "guided_regex: guided_regex.x: no token is left"}
    assert len(bench.tokens[1]) == before
    bench.finish()
    assert bench.tokens[2] == reference(PROMPT, 4)


@pytest.mark.parametrize(
    ("params", "failed", "told"),
    [
        (
            {"allowed_token_ids": (5,)},
            RowFailed("no token is left"),
            ("allowed_token_ids: no token is left", "allowed_token_ids"),
        ),
        ({"bad_words_token_ids": ((5,),)}, RowFailed("no token is left"), ("bad_words: no token is left", "bad_words")),
        ({"min_tokens": 2}, RowFailed("no token is left"), ("min_tokens: no token is left", "min_tokens")),
        ({}, RowFailed("no token is left"), ("no token is left", "")),
        ({"allowed_token_ids": (5,)}, RowFailed("no numbers", ErrorKind.INTERNAL), ("no numbers", "")),
    ],
)
def test_a_row_without_a_token_names_what_left_none(
    params: dict[str, Any], failed: RowFailed, told: tuple[str, str]
) -> None:
    """A client's parameter, with 400; else it is the server's fault."""
    bench = GrammarBench(limits(), 16, 4)
    bench.give(1, **params)
    plan = bench.plans.popleft()
    result = bench.model.run(plan)
    bench.event(Received(WORKER, LIFE, StepResult(result.session, result.step, result.token_ids, failed={0: failed})))
    assert bench.refused == {1: f"{told[1]}: {told[0]}"}
    assert bench.error_kinds == {1: ErrorKind.INVALID if told[1] else ErrorKind.INTERNAL}


def test_a_row_with_a_grammar_has_drafts() -> None:
    bench = GrammarBench(limits(), 16, 4, max_drafts=3)
    bench.give(1, "a", max_tokens=12)
    bench.ready(bench.asked[0])
    seen = []
    while bench.plans:
        seen += [bench.plans[0].num_drafts]
        bench.step()
    assert pack_i32([3]) in seen
    assert bench.tokens[1] == reference(PROMPT, 12)
