"""The table of states: what may follow what, and that a session and an operator's wish do not change each other."""

import itertools

import pytest
from bench import COORDINATOR, LIFE, WORKER, Bench, limits, reference

from meshlm.protocol.operations import Action, Operation, OperationId, Pause, Resume, Stop
from meshlm.protocol.wire.ids import RequestId
from meshlm.runtime.process.events import InvalidTransition, PeerLost, PeerUp, Received, check_transition
from meshlm.scheduler_proc.states import TRANSITIONS, Planning, RankState, RequestState, Session, State

KINDS = (Session, Planning, RequestState)


def test_every_state_has_its_row_and_only_states_of_its_kind_follow() -> None:
    assert set(TRANSITIONS) == {state for kind in KINDS for state in kind}
    for state, following in TRANSITIONS.items():
        assert {type(one) for one in following} <= {type(state)}
    for state in (Session.GATHERING, Planning.RUNNING, RequestState.WAITING):
        reached: set[State] = {state}
        while more := {after for one in reached for after in TRANSITIONS[one]} - reached:
            reached |= more
        assert reached == set(type(state)), "a state that nothing leads to"


@pytest.mark.parametrize(("before", "after"), [pair for kind in KINDS for pair in itertools.product(kind, kind)])
def test_what_the_table_does_not_have_is_a_bug(
    before: Session | Planning | RequestState, after: Session | Planning | RequestState
) -> None:
    if after in TRANSITIONS[before]:
        check_transition(TRANSITIONS, before, after, "r1")
        return
    with pytest.raises(InvalidTransition, match=rf"r1: {before.value} -> {after.value}; so far: arrived"):
        check_transition(TRANSITIONS, before, after, "r1", ["arrived"])


def test_a_session_by_its_events() -> None:
    bench = Bench(limits(), 16, 4)
    rank, seen = bench.core.workers.rank, []
    seen.append((rank.session, rank.serves, rank.plans))
    bench.core.handle(PeerLost(WORKER, LIFE), 1.0)
    seen.append((rank.session, rank.serves, rank.plans))
    sends = bench.core.handle(PeerUp(WORKER, LIFE), 2.0)
    seen.append((rank.session, rank.serves, rank.plans))
    bench.take(sends)
    seen.append((rank.session, rank.serves, rank.plans))
    serving = (Session.SERVING, True, True)
    assert seen == [serving, (Session.GATHERING, False, False), (Session.PREPARING, False, False), serving]


def operate(bench: Bench, action: Action) -> None:
    bench.take(bench.core.handle(Received(COORDINATOR, LIFE, Operation(OperationId("o"), action)), bench.now))


def test_a_rank_that_drains_goes_on_to_do_so_with_new_workers() -> None:
    bench = Bench(limits(max_num_seqs=2), 64, 4)
    bench.assign(1, [1, 2], 6)
    bench.step()
    bench.step()
    operate(bench, Pause(wait=True))
    bench.assign(2, [3], 5)
    bench.lose_worker()
    while bench.plans:
        bench.step()
    assert bench.tokens == {1: reference([1, 2], 6)}, "what had begun is computed to its end, and nothing else begins"
    assert [request.work.request_id for request in bench.core.batching.waiting] == [RequestId("r2")]
    operate(bench, Resume())
    bench.take(bench.core.plan(0))
    bench.finish()
    assert bench.tokens[2] == reference([3], 5)


def test_a_stopped_rank_stays_so() -> None:
    bench = Bench(limits(), 16, 4)
    for action in (Stop(), Pause(), Resume(), Pause(wait=True), Stop()):
        operate(bench, action)
        assert bench.core.workers.rank.planning is Planning.STOPPED
    bench.assign(1, [1], 5)
    assert not bench.plans
    assert not RankState().paused
