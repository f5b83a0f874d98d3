"""Requests that a rank gives back, so that they may run at another one: which, and with what is known of them."""

from bench import COORDINATOR, DETOKENIZER, LIFE, OTHER, WORKER, Bench, limits, reference

from meshlm.protocol.edges.admit import Assign, EngineRequest, GiveBack, Load, Readmit, Returned
from meshlm.protocol.edges.token import StillThere
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import FinishReason, Handle, RequestId
from meshlm.runtime.process.events import PeerLost, PeerUp, Received, Send
from meshlm.scheduler_proc.core import Scheduler
from meshlm.scheduler_proc.limits import MAX_CRASHES
from meshlm.scheduler_proc.states import RequestState


def test_only_what_has_not_started_is_given_back() -> None:
    bench = Bench(limits(max_num_seqs=1), 64, 4)
    for handle in (1, 2, 3):
        bench.assign(handle, [handle], 5)
    bench.step()
    bench.event(Received(COORDINATOR, LIFE, GiveBack((RequestId("r1"), RequestId("r3"), RequestId("r9")))))
    assert bench.returned == {3}
    bench.finish()
    assert sorted(bench.ended) == [1, 2]
    assert bench.ended_ids == ["r1", "r2"]


def test_a_preempted_request_is_not_given_back_while_there_are_workers() -> None:
    bench = Bench(limits(max_num_batched_tokens=2, async_depth=1), 64, 4)
    bench.assign(1, [1, 2], 5)
    bench.assign(2, [3], 5)
    for _ in range(4):
        bench.step()
    bench.event(PeerLost(WORKER, LIFE))
    bench.event(PeerUp(WORKER, LIFE))
    assert bench.core.requests[RequestId("r2")].state is RequestState.PREEMPTED
    bench.event(Received(COORDINATOR, LIFE, GiveBack((), everything=True)))
    assert not bench.returned
    bench.finish()
    assert bench.tokens == {1: reference([1, 2], 5), 2: reference([3], 5)}


def test_without_workers_all_are_given_back_and_what_may_have_killed_them_is_told() -> None:
    bench = Bench(limits(max_num_seqs=2), 64, 4)
    for handle in range(1, 4):
        bench.assign(handle, [handle, 2], 5)
    bench.step()
    begun = {handle: list(tokens) for handle, tokens in bench.tokens.items()}
    bench.event(PeerLost(WORKER, LIFE))
    bench.event(Received(COORDINATOR, LIFE, GiveBack((), everything=True)))
    assert bench.returned == {1, 2, 3}
    assert bench.num_crashes == {1: 1, 2: 1, 3: 0}, "the third was in no step"
    assert not bench.ended_ids
    bench.event(PeerUp(WORKER, LIFE))
    bench.finish()
    assert bench.tokens == begun


def test_deaths_of_workers_count_where_a_request_was_before_too() -> None:
    for crashes_before, given_up in ((MAX_CRASHES - 2, False), (MAX_CRASHES - 1, True)):
        bench = Bench(limits(), 64, 4)
        bench.assign(1, [1, 2], 5, num_crashes=crashes_before)
        bench.event(PeerLost(WORKER, LIFE))
        assert (bench.ended == {1: FinishReason.ERROR}) is given_up
        if not given_up:
            bench.event(Received(COORDINATOR, LIFE, GiveBack((RequestId("r1"),))))
            assert bench.num_crashes == {1: crashes_before + 1}
    bench = Bench(limits(), 64, 4)
    bench.assign(1, [1, 2], 5, num_crashes=MAX_CRASHES - 1)
    bench.step()
    bench.event(PeerLost(WORKER, LIFE))
    assert not bench.ended, "it got a token meanwhile"


def test_what_waits_for_its_detokenizer_is_given_back_too() -> None:
    core = Scheduler(limits())
    work = EngineRequest(RequestId("r"), Handle(7), pack_i32([1]), SamplingParams(max_tokens=2), attempt=3)
    core.handle(Received(COORDINATOR, LIFE, Assign(work, DETOKENIZER, LIFE)), 0.0)
    assert core.handle(Received(COORDINATOR, LIFE, GiveBack((RequestId("r"),))), 0.0) == []
    (told,) = core.report()
    assert isinstance(told.message, Load)
    assert told.message.returned == (Returned(RequestId("r"), 3, Handle(7), DETOKENIZER, LIFE),)


def test_a_detokenizer_hears_what_its_rank_does_not_have() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, [1, 2], 5)
    assert bench.core.handle(Received(DETOKENIZER, LIFE, StillThere(pack_i32([1]))), 0.0) == []
    (told,) = bench.core.handle(Received(DETOKENIZER, LIFE, StillThere(pack_i32([1, 8]))), 0.0)
    assert told == Send(DETOKENIZER, Readmit((Handle(8),)))
    (told,) = bench.core.handle(Received(OTHER, LIFE, StillThere(pack_i32([1]))), 0.0)
    assert told == Send(OTHER, Readmit((Handle(1),))), "another's handle"
