"""The prefix cache outlives its scheduler: the next one finds what was computed, and only what was."""

import pytest
from bench import COORDINATOR, DETOKENIZER, LIFE, WORKER, Bench, limits, reference
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.protocol.edges.admit import Assign, EngineRequest
from meshlm.protocol.edges.step import Reset, StepFailed, WorkerReady
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, RequestId
from meshlm.runtime.process.events import PeerUp, Received
from meshlm.scheduler_proc.batching import Batching
from meshlm.scheduler_proc.core import Scheduler


def take_over(bench: Bench) -> None:
    """Another scheduler for the same worker and the same clients, who bring the tokens that they have."""
    bench.core = Scheduler(bench.limits)
    bench.now += 1.0
    bench.take(bench.core.handle(PeerUp(DETOKENIZER, LIFE), bench.now))
    bench.event(PeerUp(WORKER, LIFE))


def resume(bench: Bench, handle: int, prompt: list[int], max_tokens: int) -> None:
    done = bench.tokens.get(handle, [])
    sampling = SamplingParams(max_tokens=max_tokens)
    work = EngineRequest(RequestId(f"r{handle}"), Handle(handle), pack_i32(prompt), sampling, 1, pack_i32(done))
    bench.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))


def test_a_stream_goes_on_from_its_last_full_block() -> None:
    prompt = list(range(40))
    bench = Bench(limits(), 64, 4)
    bench.assign(1, prompt, 30)
    for _ in range(10):
        bench.step()
    have = len(prompt) + len(bench.tokens[1])
    take_over(bench)
    resume(bench, 1, prompt, 30)
    bench.step()
    assert bench.core.load.prompt_tokens <= 8, "two blocks at most: the last one, and one whose end was in flight"
    assert bench.cached == {1: len(prompt)}
    assert have - 8 <= bench.core.batching.cache_hits
    bench.finish()
    assert bench.tokens[1] == reference(prompt, 30)


def test_nothing_is_kept_without_prefix_caching() -> None:
    bench = Bench(limits(prefix_caching=False), 64, 4)
    bench.assign(1, list(range(40)), 5)
    bench.finish()
    assert bench.directory.columns() == (b"", b"")


def test_nothing_is_kept_of_a_session_in_which_a_step_failed() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, list(range(40)), 5)
    bench.step()
    assert bench.directory.columns()[0]
    bench.directory.spoil()
    assert bench.directory.columns() == (b"", b"")
    bench.event(Received(WORKER, LIFE, StepFailed(bench.core.session, bench.plans[0].step, "broken")))
    take_over(bench)
    bench.assign(2, list(range(40)), 5)
    bench.finish()
    assert bench.cached[2] == 0
    assert bench.directory.columns()[0], "the next session is kept again"


@pytest.mark.parametrize(("second", "is_found"), [((b"", b""), False), (None, True)])
def test_all_workers_of_a_group_must_have_kept_the_same(second: tuple[bytes, bytes] | None, is_found: bool) -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, list(range(40)), 5)
    bench.finish()
    kept = bench.directory.columns()
    batching = Batching(bench.limits, WorkerReady(1, 64, 4, 64, 64, 99))
    batching.restore([WorkerReady(1, 64, 4, 64, 64, 99, *kept), WorkerReady(1, 64, 4, 64, 64, 99, *(second or kept))])
    assert (batching.kv.pool.take_changes()[1] != b"") is is_found


@settings(deadline=None)
@given(st.data())
def test_any_lives(data: st.DataObject) -> None:
    """Requests that share prefixes, little memory, and schedulers that die at any moment."""
    draw = data.draw
    bench = Bench(limits(max_model_len=64, max_num_seqs=draw(st.integers(1, 4))), draw(st.integers(32, 40)), 2)
    asked: dict[int, tuple[list[int], int]] = {}
    for handle in range(draw(st.integers(1, 6))):
        prompt = list(range(draw(st.integers(0, 20)))) + draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
        asked[handle] = (prompt, draw(st.integers(1, 64 - len(prompt))))
        bench.assign(handle, *asked[handle])
        for _ in range(draw(st.integers(0, 9))):
            if bench.plans:
                bench.step()
        if draw(st.booleans()):
            take_over(bench)
            for known in [one for one in asked if one not in bench.ended]:
                resume(bench, known, *asked[known])
    bench.finish()
    assert {one: bench.tokens[one] for one in asked} == {one: reference(*asked[one]) for one in asked}


def test_a_reset_is_said_before_anything_is_believed() -> None:
    sends = Scheduler(limits()).handle(PeerUp(WORKER, LIFE), 1.0)
    assert [type(send.message) for send in sends if send.to == WORKER] == [Reset]
