"""Requests for a vector of their prompt: one answer, made of KV that is really theirs, and no tokens."""

import msgspec
import pytest
from bench import LIFE, WORKER, Bench, limits, reference
from hypothesis import given, settings
from hypothesis import strategies as st
from rolling_hash import pooled_reference

from meshlm.protocol.edges.step import RowFailed
from meshlm.protocol.edges.token import ALONE_BYTES, TokenDeltas
from meshlm.protocol.pool import Pool, PoolKind
from meshlm.protocol.wire.ids import ErrorKind, FinishReason
from meshlm.runtime.process.events import PeerLost, PeerUp, Received
from meshlm.scheduler_proc import sizes

LAST, MEAN, CLS = Pool(PoolKind.LAST), Pool(PoolKind.MEAN), Pool(PoolKind.CLS)
KINDS = pytest.mark.parametrize("task", [LAST, MEAN, CLS])
PROMPT = list(range(20, 39))


@KINDS
@pytest.mark.parametrize("length", [1, 2, 9, 16, 17, 19])
@pytest.mark.parametrize("budget", [4, 32])
def test_a_vector_and_no_token(task: Pool, length: int, budget: int) -> None:
    bench = Bench(limits(max_num_batched_tokens=budget), 16, 4)
    bench.assign(1, PROMPT[:length], 5, extras=(task,))
    bench.finish()
    assert bench.pooled == {1: pooled_reference(PROMPT[:length], task.kind)}
    assert bench.ended == {1: FinishReason.STOP}
    assert bench.tokens == {1: []}
    assert bench.ended_ids == ["r1"]


def test_a_prompt_may_fill_the_context() -> None:
    bench = Bench(limits(max_model_len=19), 16, 4)
    bench.assign(1, PROMPT, 5, extras=(LAST,))
    bench.finish()
    assert bench.pooled == {1: pooled_reference(PROMPT, PoolKind.LAST)}


def test_the_last_token_s_vector_reads_the_prefix_cache_and_no_other_does() -> None:
    bench = Bench(limits(), 32, 4)
    for handle, task in enumerate((LAST, LAST, MEAN, CLS), 1):
        bench.assign(handle, PROMPT, 5, extras=(task,))
        bench.finish()
        assert bench.pooled[handle] == pooled_reference(PROMPT, task.kind)
    assert bench.cached == {1: 0, 2: 16, 3: 0, 4: 0}
    assert bench.started == {"r1": 0, "r2": 16, "r3": 0, "r4": 0}


@KINDS
@pytest.mark.parametrize("num_steps", range(5))
@pytest.mark.parametrize("what", ["preemption", "death"])
def test_one_answer_whatever_happens_between(task: Pool, num_steps: int, what: str) -> None:
    """Five chunks; among others when the last one is on its way."""
    bench = Bench(limits(max_num_batched_tokens=4), 16, 4)
    bench.assign(1, PROMPT, 5, extras=(task,))
    for _ in range(num_steps):
        bench.step()
    if what == "death":
        bench.lose_worker()
    else:
        (request,) = bench.core.requests.values()
        bench.core.batching.preempt(request, "decode")
        bench.core.check()
    bench.finish()
    assert bench.pooled == {1: pooled_reference(PROMPT, task.kind)}
    assert bench.ended == {1: FinishReason.STOP}


def test_what_the_workers_cannot_pool_is_refused_by_name() -> None:
    """At once, or when the first worker is there."""

    class LastOnly(Bench):
        pool_kinds = (PoolKind.LAST,)

    for before in (False, True):
        bench = LastOnly(limits(), 16, 4)
        if before:
            bench.event(PeerLost(WORKER, LIFE))
        bench.assign(1, PROMPT, 5, extras=(MEAN,))
        bench.assign(2, PROMPT, 5, extras=(LAST,))
        if before:
            assert not bench.ended
            bench.event(PeerUp(WORKER, LIFE))
        bench.finish()
        assert bench.refused == {1: "task: the workers of this model cannot pool 'mean'"}
        assert bench.ended == {1: FinishReason.ERROR, 2: FinishReason.STOP}


def test_too_long_for_the_cache_is_refused_too_when_it_came_before_the_workers() -> None:
    bench = Bench(limits(), 4, 4)
    bench.event(PeerLost(WORKER, LIFE))
    bench.assign(1, PROMPT, 5, extras=(LAST,))
    bench.assign(2, [1] * 10, 50)
    bench.assign(3, [1] * 10, 2)
    bench.event(PeerUp(WORKER, LIFE))
    bench.finish()
    assert bench.refused[1] == "prompt: the prompt has 19 tokens, and the KV cache holds 16"
    assert bench.refused[2].startswith("max_tokens: this request may need 60 tokens")
    assert bench.tokens[3] == reference([1] * 10, 2)


def test_vectors_of_a_step_fit_into_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MAX_STEP_BYTES", 600)
    bench = Bench(limits(), 64, 4)
    batching = bench.core.batching
    batching.facts = msgspec.structs.replace(batching.facts, pooled_bytes=250)
    for handle in range(1, 6):
        bench.assign(handle, [handle] * 20, 5, extras=(LAST,))
    most = 0
    while bench.plans:
        most = max(most, len(bench.core.batching.running))
        bench.step()
    assert most == 2
    assert len(bench.pooled) == 5


class LongVectors(Bench):
    """A message with a vector has no other row."""

    num_messages = 0

    def step(self) -> None:
        result = self.model.run(self.plans.popleft())
        for place in result.pooled:
            result.pooled[place] = bytes(ALONE_BYTES + 4)
        self.event(Received(WORKER, LIFE, result))

    def _deltas(self, deltas: TokenDeltas) -> None:
        super()._deltas(deltas)
        if deltas.pooled:
            self.num_messages += 1
            assert list(deltas.pooled) == [0]
            assert len(deltas.handles) == 4


def test_a_long_vector_has_a_message_of_its_own() -> None:
    bench = LongVectors(limits(), 64, 4)
    for handle, task in enumerate((None, LAST, None, LAST, None), 1):
        bench.assign(handle, [handle] * 2, 9, extras=() if task is None else (task,))
    bench.finish()
    assert bench.num_messages == 2
    for handle in (1, 3, 5):
        assert bench.tokens[handle] == reference([handle] * 2, 9)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_among_others(data: st.DataObject) -> None:
    """Few blocks, small budgets, drafts, deaths."""
    draw = data.draw
    bench = Bench(
        limits(
            max_model_len=32,
            max_crashes=4,
            max_num_seqs=draw(st.integers(1, 6)),
            max_num_batched_tokens=draw(st.integers(6, 40)),
            async_depth=draw(st.integers(1, 3)),
            prefix_caching=draw(st.booleans()),
            num_stages=draw(st.sampled_from([1, 1, 2])),
        ),
        draw(st.integers(16, 30)),
        2,
        draw(st.sampled_from([0, 3])),
    )
    asked: dict[int, tuple[list[int], Pool | None]] = {}
    deaths = 0
    for handle in range(draw(st.integers(5, 30))):
        action = draw(st.sampled_from(["assign", "assign", "step", "step", "step", "death"]))
        if action == "assign":
            prompt = list(range(draw(st.integers(0, 20)))) + draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
            task = draw(st.sampled_from([None, LAST, MEAN, CLS]))
            asked[handle] = (prompt, task)
            bench.assign(handle, prompt, 3, extras=() if task is None else (task,))
        elif action == "death" and deaths < 3:
            deaths += 1
            bench.lose_worker()
        elif bench.plans:
            bench.step()
    bench.finish()
    for handle, (prompt, task) in asked.items():
        if task is None:
            assert bench.tokens[handle] == reference(prompt, min(3, 32 - len(prompt)))
        else:
            assert bench.pooled[handle] == pooled_reference(prompt, task.kind)
            assert bench.ended[handle] is FinishReason.STOP


def test_a_vector_that_its_worker_refuses_ends_the_request_with_an_error() -> None:
    bench = Bench(limits(), 16, 4)
    bench.assign(1, PROMPT, 5, extras=(LAST,))
    bench.assign(2, PROMPT[:5], 5, extras=(LAST,))
    while bench.plans:
        handles = [request.handle for request in bench.core.inflight[0].batch]
        result = bench.model.run(bench.plans.popleft())
        bad = [place for place in result.pooled if handles[place] == 1]
        failed = {place: RowFailed("not finite", ErrorKind.INTERNAL) for place in bad}
        pooled = {place: vector for place, vector in result.pooled.items() if place not in bad}
        bench.event(Received(WORKER, LIFE, msgspec.structs.replace(result, failed=failed, pooled=pooled)))
    assert (bench.refused, list(bench.pooled)) == ({1: ": not finite"}, [2])
    assert bench.error_kinds == {1: ErrorKind.INTERNAL}
    assert not bench.core.requests
