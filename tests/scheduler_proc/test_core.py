"""The scheduler against a fake worker that proves its KV: random arrivals, aborts, results, preemptions, deaths."""

from array import array

import numpy as np
import pytest
from bench import COORDINATOR, DETOKENIZER, LIFE, VOCAB, WORKER, Bench, limits, reference
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.protocol.edges.admit import AbortRequests, Assign, EngineRequest, GiveBack, Load, ReportLoad
from meshlm.protocol.edges.control import GraphCounts
from meshlm.protocol.edges.step import Reset, WorkerReady, WorkerStats
from meshlm.protocol.edges.token import Disown
from meshlm.protocol.sampling import RepetitionDetection, SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.events import PeerLost, PeerUp, Received, Tick
from meshlm.scheduler_proc.core import Scheduler
from meshlm.scheduler_proc.limits import MAX_CRASHES
from meshlm.scheduler_proc.request import Request


def test_one_request() -> None:
    bench = Bench(limits(), 16, 4)
    bench.assign(1, [5, 6, 7], 10)
    bench.finish()
    assert bench.tokens[1] == reference([5, 6, 7], 10)
    assert bench.ended == {1: FinishReason.LENGTH}


def test_stop_token_ends_and_later_steps_are_dropped() -> None:
    expected = reference([5], 20)
    bench = Bench(limits(), 16, 4)
    bench.assign(1, [5], 20, stop=(expected[4],))
    bench.finish()
    assert bench.tokens[1] == expected[: expected.index(expected[4]) + 1]
    assert bench.ended == {1: FinishReason.STOP}


def test_repetition_ends_a_request_though_later_steps_are_in_flight() -> None:
    def end_of(tokens: list[int]) -> int:
        return next((end for end in range(2, 18) if tokens[end - 1] == tokens[end - 2]), 0)

    first = next(prompt for prompt in range(VOCAB) if end_of(reference([prompt], 20)) > 2)
    expected, end = reference([first], 20), end_of(reference([first], 20))
    wanted = RepetitionDetection(max_pattern_size=1, min_count=2)
    for min_tokens, count, why in ((0, end, FinishReason.REPETITION), (20, 20, FinishReason.LENGTH)):
        bench = Bench(limits(), 16, 4)
        params = SamplingParams(max_tokens=20, min_tokens=min_tokens, repetition_detection=wanted)
        work = EngineRequest(RequestId("r"), Handle(1), pack_i32([first]), params)
        bench.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))
        bench.finish()
        assert bench.tokens[1] == expected[:count]
        assert bench.ended == {1: why}


def test_equal_prefix_is_found_and_salt_separates() -> None:
    prompt = list(range(20))
    bench = Bench(limits(), 64, 4)
    bench.assign(1, prompt, 2)
    bench.finish()
    bench.assign(2, prompt, 2)
    bench.assign(3, prompt, 2, cache_salt="other")
    bench.finish()
    assert bench.cached == {1: 0, 2: 16, 3: 0}
    assert bench.tokens[1] == bench.tokens[2] == bench.tokens[3]


def test_asynchronous_depth_keeps_two_steps_in_flight() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, [1, 2], 10)
    assert len(bench.plans) == 2


def test_no_step_is_wasted_at_max_tokens() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, [1, 2], 3)
    bench.finish()
    assert bench.core.num_steps == 3


def test_resumed_request_goes_on_after_its_tokens() -> None:
    expected = reference([9, 8], 6)
    bench = Bench(limits(), 64, 4)
    work = EngineRequest(
        RequestId("r"), Handle(1), pack_i32([9, 8]), SamplingParams(max_tokens=6), 1, pack_i32(expected[:4])
    )
    bench.tokens[1] = expected[:4]
    bench.event(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)))
    bench.finish()
    assert bench.tokens[1] == expected


def test_too_long_for_the_cache_is_refused_in_words() -> None:
    bench = Bench(limits(), 4, 4)
    bench.assign(1, [1] * 10, 50)
    assert bench.ended == {1: FinishReason.ERROR}


def test_worker_death_loses_nothing() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, list(range(9)), 12)
    for _ in range(4):
        bench.step()
    bench.lose_worker()
    bench.finish()
    assert bench.tokens[1] == reference(list(range(9)), 12)


@pytest.mark.parametrize("by_priority", [False, True])
def test_priority_decides_who_goes_first(by_priority: bool) -> None:
    bench = Bench(limits(max_num_seqs=1, by_priority=by_priority), 64, 4)
    bench.assign(1, [1], 4)
    bench.assign(2, [2], 4, priority=5)
    bench.assign(3, [3], 4, priority=-5)
    bench.finish()
    assert list(bench.ended) == ([1, 3, 2] if by_priority else [1, 2, 3])


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_any_history_gives_every_request_its_tokens(data: st.DataObject) -> None:
    """Few blocks, so preemption happens; small budgets, so prompts are chunked."""
    draw = data.draw
    block_size = draw(st.sampled_from([2, 4]))
    num_blocks = draw(st.integers(64 // block_size, 100 // block_size))
    bench = Bench(
        limits(
            max_model_len=64,
            max_crashes=4,
            max_num_seqs=draw(st.integers(1, 6)),
            max_num_batched_tokens=draw(st.integers(6, 40)),
            async_depth=draw(st.integers(1, 3)),
            prefix_caching=draw(st.booleans()),
            by_priority=draw(st.booleans()),
            num_stages=draw(st.sampled_from([1, 1, 2, 3])),
        ),
        num_blocks,
        block_size,
        draw(st.sampled_from([0, 0, 1, 3])),
    )
    asked: dict[int, tuple[list[int], int]] = {}
    aborted: set[int] = set()
    stranded: set[int] = set()  # asked for while there was no worker
    deaths = 0
    for handle in range(draw(st.integers(5, 40))):
        action = draw(st.sampled_from(["assign", "assign", "step", "step", "step", "abort", "death", "give back"]))
        if action == "assign":
            shared = draw(st.integers(0, 20))
            prompt = list(range(shared)) + draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
            asked[handle] = (prompt, draw(st.integers(1, 64 - len(prompt))))
            bench.assign(handle, prompt, asked[handle][1], priority=draw(st.integers(-1, 1)))
        elif action == "abort" and asked:
            victim = draw(st.sampled_from(sorted(asked)))
            aborted.add(victim)
            bench.event(Received(COORDINATOR, LIFE, AbortRequests((RequestId(f"r{victim}"),))))
        elif action == "give back":
            names = tuple(RequestId(f"r{one}") for one in draw(st.sets(st.sampled_from(sorted(asked) or [0]))))
            bench.event(Received(COORDINATOR, LIFE, GiveBack(names, everything=draw(st.booleans()))))
        elif action == "death" and deaths < bench.limits.max_crashes - 1:
            deaths += 1
            bench.event(PeerLost(WORKER, LIFE))
            some = draw(st.sets(st.sampled_from(sorted(asked) or [0])))
            bench.event(Received(COORDINATOR, LIFE, GiveBack(tuple(RequestId(f"r{one}") for one in some))))
            stranded |= some
            bench.event(PeerUp(WORKER, LIFE))
        elif bench.plans:
            bench.step()
    bench.finish()
    for handle, (prompt, count) in asked.items():
        expected = reference(prompt, count)
        got = bench.tokens.get(handle, [])
        if handle in bench.returned:
            assert not got or handle in stranded, "it had started"
            assert got == expected[: len(got)]
            assert f"r{handle}" not in bench.ended_ids, "it goes on elsewhere"
        elif handle in aborted and handle not in bench.ended:
            assert got == expected[: len(got)]
        else:
            assert got == expected
            assert bench.ended[handle] is FinishReason.LENGTH


def test_a_request_whose_worker_dies_each_time_is_given_up_and_the_others_go_on() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, [1, 2, 3], 30)
    for deaths in range(1, 6):
        bench.plans.clear()
        bench.event(PeerLost(WORKER, Incarnation(deaths)))
        bench.event(PeerUp(WORKER, Incarnation(deaths + 1)))
        for _ in range(3):
            bench.step()  # it gets more tokens than were under way: what was before counts no more
    assert not bench.ended
    for deaths in range(MAX_CRASHES):
        bench.plans.clear()
        bench.event(PeerLost(WORKER, Incarnation(9 + deaths)))
        if deaths == 0:
            bench.event(PeerUp(WORKER, Incarnation(10)))
    assert bench.ended == {1: FinishReason.ERROR}
    bench.assign(2, [5, 6], 3)
    bench.event(PeerUp(WORKER, Incarnation(12)))
    bench.finish()
    assert bench.tokens[2] == reference([5, 6], 3)


def test_fewer_deaths_are_too_many_where_the_mesh_survives_fewer() -> None:
    bench = Bench(limits(max_crashes=2), 64, 4)
    bench.assign(1, [1, 2, 3], 9)
    for deaths in (1, 2):
        assert not bench.ended
        bench.plans.clear()
        bench.event(PeerLost(WORKER, Incarnation(deaths)))
        bench.event(PeerUp(WORKER, Incarnation(deaths + 1)))
    assert bench.ended == {1: FinishReason.ERROR}


def test_dead_detokenizer_frees_its_requests() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, list(range(9)), 12)
    bench.event(PeerLost(DETOKENIZER, LIFE))
    bench.finish()
    assert 1 not in bench.ended


def test_a_disowned_request_ends_and_frees_its_blocks() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, [1, 2, 3], 40)
    bench.assign(2, [4, 5], 40)
    bench.step()
    bench.event(Received(DETOKENIZER, LIFE, Disown(pack_i32([1, 99]))))
    assert list(bench.core.requests) == ["r2"]
    bench.event(Received(Identity(Role.DETOKENIZER, 5), LIFE, Disown(pack_i32([2]))))
    assert list(bench.core.requests) == ["r2"], "another detokenizer's handle"
    bench.finish()
    assert list(bench.ended) == [2]


def test_numpy_reads_the_columns() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, [1, 2, 3], 2)
    assert np.frombuffer(bench.plans[0].starts, np.int32).tolist() == [0]
    assert array("i", bench.plans[0].counts).tolist() == [3]


def test_a_request_waits_until_its_detokenizer_can_be_reached() -> None:
    bench = Bench(limits(), 64, 4)
    bench.event(PeerLost(DETOKENIZER, LIFE))
    bench.assign(1, [1, 2, 3], 4)
    bench.assign(2, [4, 5], 4)
    bench.event(Received(COORDINATOR, LIFE, AbortRequests((RequestId("r2"),))))
    assert not bench.plans
    bench.event(PeerUp(DETOKENIZER, LIFE))
    bench.finish()
    assert bench.tokens == {1: reference([1, 2, 3], 4)}


def test_an_abort_of_a_request_that_waits_for_its_detokenizer_is_reported() -> None:
    """Found by tests/simulation: the coordinator's ledger kept it for ever."""
    core = Scheduler(limits())
    work = EngineRequest(RequestId("r"), Handle(1), pack_i32([1]), SamplingParams(max_tokens=2))
    core.handle(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)), 0.0)
    assert core.handle(Received(COORDINATOR, LIFE, AbortRequests((RequestId("r"), RequestId("s")))), 0.0) == []
    (told,) = core.report()
    assert isinstance(told.message, Load)
    assert told.message.ended == ("r",)
    assert core.handle(PeerUp(DETOKENIZER, LIFE), 0.0) == []


def test_an_answer_to_an_earlier_life_of_the_scheduler_is_none_to_this_one() -> None:
    """Found by tests/simulation: the late second WorkerReady emptied the queues under running requests."""
    old = Scheduler(limits()).handle(PeerUp(WORKER, LIFE), 5.0)
    bench = Bench(limits(), 16, 4)
    bench.now = 6.0
    bench.event(PeerUp(WORKER, LIFE))
    bench.assign(1, [5, 6, 7], 10)
    resets = [send.message for send in old if isinstance(send.message, Reset)]
    bench.event(Received(WORKER, LIFE, WorkerReady(resets[0].session, 16, 4, 64, 64, VOCAB)))
    bench.finish()
    assert bench.tokens[1] == reference([5, 6, 7], 10)


# --- what the coordinator is told, and asks back ---


def test_the_first_token_is_told_with_what_was_cached() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, list(range(10)), 2)
    bench.finish()
    bench.assign(2, list(range(10)), 2)
    assert bench.started == {"r1": 0}
    bench.finish()
    assert bench.started == {"r1": 0, "r2": 8}


def test_what_was_cached_at_a_worker_that_died_is_computed_anew_and_said_so() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, list(range(10)), 2)
    bench.finish()
    bench.assign(2, list(range(10)), 2)
    assert bench.plans, "its first step is on its way, with 8 tokens from the cache"
    bench.lose_worker()
    bench.finish()
    assert (bench.cached[2], bench.started["r2"]) == (0, 0)


def test_what_a_request_computed_before_it_was_preempted_was_not_cached_for_it() -> None:
    bench = Bench(limits(), 64, 4)
    prompt = [7 * n % 50 for n in range(90)]  # three steps
    bench.assign(1, prompt, 2)
    bench.step()
    bench.core.batching.preempt(bench.core.requests[RequestId("r1")], "cache_full")
    bench.finish()
    assert (bench.tokens[1], bench.cached[1]) == (reference(prompt, 2), 0)


def test_graph_counts_go_to_the_coordinator_once_and_again_to_a_new_one() -> None:
    bench = Bench(limits(), 64, 4)
    counts = GraphCounts({"decode": 3}, {"off": 1})
    bench.core.handle(Received(WORKER, LIFE, WorkerStats(counts)), 0.0)

    def told(event: Tick | PeerUp) -> list[GraphCounts | None]:
        bench.core.handle(event, 0.0)
        return [send.message.graphs for send in bench.core.report() if isinstance(send.message, Load)]

    of_its_life = GraphCounts({"decode": 3}, {"off": 1}, LIFE)
    assert told(Tick(1.0)) == [of_its_life]
    assert told(Tick(2.0)) == [None]
    assert told(PeerUp(COORDINATOR, Incarnation(2))) == [of_its_life]


def test_a_load_that_is_asked_for_knows_of_the_abort_before() -> None:
    core = Bench(limits(), 64, 4).core
    work = EngineRequest(RequestId("r1"), Handle(1), pack_i32([1, 2]), SamplingParams(max_tokens=9))

    def reported(*events: Received | PeerUp) -> list[tuple[int, int]]:
        for event in events:
            core.handle(event, 0.0)
        loads = [send.message for send in core.report() if isinstance(send.message, Load)]
        return [(load.num_waiting + load.num_running, load.answers) for load in loads]

    assert reported(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE))) == [(1, 0)]
    assert reported() == []
    abort = AbortRequests((RequestId("r1"),))
    assert reported(Received(COORDINATOR, LIFE, abort), Received(COORDINATOR, LIFE, ReportLoad(5))) == [(0, 5)]
    assert reported(Received(COORDINATOR, LIFE, ReportLoad(6))) == [(0, 6)], "though nothing has changed"
    assert reported(PeerUp(COORDINATOR, Incarnation(2))) == [(0, 0)], "its numbers begin anew"


def test_a_burst_of_requests_is_reported_once_and_after_the_plan() -> None:
    bench = Bench(limits(), 64, 4)
    for number in range(1, 5):
        work = EngineRequest(RequestId(f"r{number}"), Handle(number), pack_i32([1, 2]), SamplingParams(max_tokens=2))
        assert bench.core.handle(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)), 0.0) == []
    assert bench.core.plan(0)
    (told,) = bench.core.report()
    assert isinstance(told.message, Load)
    assert (told.message.num_running, told.message.num_waiting) == (4, 0)
    assert bench.core.report() == []


def test_of_thousands_that_wait_each_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their client left: each was looked for from the beginning of the queue."""
    bench = Bench(limits(max_num_seqs=1), 64, 4)
    for handle in range(1, 102):
        bench.assign(handle, [1, 2, 3], 3)
    bench.step()
    compared: list[object] = []

    def equal(one: Request, other: object) -> bool:
        compared.append(other)
        return one is other

    monkeypatch.setattr(Request, "__eq__", equal)
    monkeypatch.setattr(Request, "__hash__", object.__hash__)
    names = tuple(RequestId(f"r{handle}") for handle in range(101, 1, -1))
    bench.event(Received(COORDINATOR, LIFE, AbortRequests(names)))
    assert len(compared) <= len(names)
    assert bench.core.table.batching is not None
    assert not bench.core.table.batching.waiting
