"""The table of a request's states: what may follow what, and the way of one request through it."""

import itertools

import pytest
from journal_bench import S0, S1, Bench, admits

from meshlm.detokenizer.states import IN_ATTEMPT, TRANSITIONS, RequestStatus
from meshlm.protocol.wire.ids import COORDINATOR, RequestId
from meshlm.runtime.process.events import InvalidTransition, check_transition


def test_all_states_are_in_the_table_and_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(RequestStatus)
    reached = {RequestStatus.ENCODING}
    while more := {after for one in reached for after in TRANSITIONS[one]} - reached:
        reached |= more
    assert reached == set(RequestStatus)
    assert all(RequestStatus.FINISHED in TRANSITIONS[one] for one in IN_ATTEMPT)


@pytest.mark.parametrize(("before", "after"), [*itertools.product(RequestStatus, RequestStatus)])
def test_what_the_table_does_not_have_is_a_bug(before: RequestStatus, after: RequestStatus) -> None:
    if after in TRANSITIONS[before]:
        check_transition(TRANSITIONS, before, after, "r1")
        return
    with pytest.raises(InvalidTransition, match=f"r1: {before.value} -> {after.value}"):
        check_transition(TRANSITIONS, before, after, "r1")


def test_a_request_by_its_events() -> None:
    bench = Bench(coordinator=0)
    bench.up(S0)
    bench.up(S1)
    assert not admits(bench.submit())
    request = bench.core.journal.by_id[RequestId("r")]
    seen = [request.status]
    (admit,) = admits(bench.up(COORDINATOR, 1))
    seen.append(request.status)
    bench.routed(admit)
    seen.append(request.status)
    bench.tokens(admit, 0, "a")
    seen.append(request.status)
    (again,) = admits(bench.lost(S0))
    seen.append(request.status)
    bench.lost(COORDINATOR)
    assert again.work.output_token_ids == request.output_token_ids.tobytes()
    (third,) = admits(bench.up(COORDINATOR, 2))
    seen.append(request.status)
    bench.tokens(third, 1, "b", S1)  # before Routed, which may be late
    seen.append(request.status)
    unasked, asked, routed, heard = IN_ATTEMPT
    assert seen == [unasked, asked, routed, heard, asked, asked, heard]
