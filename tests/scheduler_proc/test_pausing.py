"""A paused rank plans nothing and loses nothing; requests are ended by the names that their clients know."""

import pytest
from bench import COORDINATOR, LIFE, Bench, limits, reference

from meshlm.protocol.edges.admit import Load
from meshlm.protocol.operations import AbortRunning, Action, Operation, OperationDone, OperationId, Pause, Resume
from meshlm.protocol.wire.ids import FinishReason, RequestId
from meshlm.runtime.process.events import Received
from meshlm.scheduler_proc.pausing import ended_by


def operate(bench: Bench, action: Action) -> OperationDone:
    """As the coordinator asks for it; no worker is asked."""
    (*rest, done) = bench.core.handle(Received(COORDINATOR, LIFE, Operation(OperationId("o"), action)), 1.0)
    for send in (*rest, done):
        if send.to == COORDINATOR:
            assert isinstance(send.message, OperationDone)
            return send.message
    raise AssertionError(rest)


def drain(bench: Bench) -> None:
    while bench.plans:
        bench.step()


def test_a_paused_rank_goes_on_where_it_was() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, [1, 2], 10)
    for _ in range(3):
        bench.step()
    assert operate(bench, Pause()) == OperationDone(OperationId("o"))
    drain(bench)
    had = len(bench.tokens[1])
    assert had < 10
    bench.assign(2, [3], 5)
    assert bench.core.plan(0) == []
    bench.core.load.tell_all()
    assert [send.message.paused for send in bench.core.report() if isinstance(send.message, Load)] == [True]
    operate(bench, Resume())
    for send in bench.core.plan(0):
        bench.plans.append(send.message)  # type: ignore[arg-type]
    bench.finish()
    assert bench.tokens == {1: reference([1, 2], 10), 2: reference([3], 5)}


def test_pause_with_abort_ends_all_that_is_there() -> None:
    bench = Bench(limits(max_num_seqs=1), 64, 4)
    for handle in (1, 2):
        bench.assign(handle, [handle], 10)
    assert operate(bench, Pause(abort=True)).count == 2
    assert not bench.core.requests


def test_pause_that_waits_lets_what_has_begun_end() -> None:
    """Also where it has to be preempted; what had not begun waits for Resume, and so does what comes meanwhile."""
    bench = Bench(limits(max_num_seqs=2), 8, 4)
    bench.assign(1, [1, 2], 18)
    bench.assign(2, [3, 4], 18)
    bench.assign(3, [5], 5)
    bench.step()
    assert operate(bench, Pause(wait=True)) == OperationDone(OperationId("o"))
    bench.assign(4, [6], 5)
    assert bench.core.batching.num_running == 2
    drain(bench)
    assert bench.core.batching.num_preemptions, "the two have no room beside one another"
    assert {handle: tokens for handle, tokens in bench.tokens.items() if tokens} == {
        1: reference([1, 2], 18),
        2: reference([3, 4], 18),
    }
    assert (bench.core.batching.num_running, len(bench.core.batching.waiting)) == (0, 2)
    operate(bench, Resume())
    for send in bench.core.plan(0):
        bench.plans.append(send.message)  # type: ignore[arg-type]
    bench.finish()
    assert (bench.tokens[3], bench.tokens[4]) == (reference([5], 5), reference([6], 5))


@pytest.mark.parametrize(
    ("names", "ended"),
    [
        ((), ["cmpl-a-1f2e3d4c-0", "chatcmpl-a-b-2f2e3d4c-0-187a2b3c4d5e6f-12", "resp_c-0"]),
        (("cmpl-a",), ["cmpl-a-1f2e3d4c-0"]),
        (("a",), ["cmpl-a-1f2e3d4c-0"]),
        (("a-b",), ["chatcmpl-a-b-2f2e3d4c-0-187a2b3c4d5e6f-12"]),
        (("resp_c", "nobody"), ["resp_c-0"]),
        (("chatcmpl",), []),
    ],
)
def test_names(names: tuple[str, ...], ended: list[str]) -> None:
    known = [RequestId(name) for name in ("cmpl-a-1f2e3d4c-0", "chatcmpl-a-b-2f2e3d4c-0-187a2b3c4d5e6f-12", "resp_c-0")]
    assert ended_by(AbortRunning(names), known) == ended


def test_what_is_ended_is_told() -> None:
    bench = Bench(limits(), 64, 4)
    bench.assign(1, [1, 2], 10)
    effects = bench.core.handle(Received(COORDINATOR, LIFE, Operation(OperationId("o"), AbortRunning(("r1",)))), 1.0)
    reasons = [end.reason for send in effects for end in getattr(send.message, "ended", ())]
    assert reasons == [FinishReason.ABORT]
