"""What is admitted again, and where: against deaths of schedulers and the coordinator, and requests that are given back."""

import pytest
from journal_bench import S0, S1, Bench, admits, admitted, token_ids

from meshlm.protocol.edges.admit import AbortRequests, Admit, RankLost, Readmit, SchedulerIncarnation
from meshlm.protocol.edges.token import StillThere
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, FinishReason, Handle, Incarnation
from meshlm.runtime.process.deaths import MAX_DEATHS, WINDOW_S
from meshlm.runtime.process.events import PeerLost, Send

# --- schedulers die ---


def test_a_dead_schedulers_requests_are_admitted_again() -> None:
    bench = Bench()
    first, other = admitted(bench.submit("a")), admitted(bench.submit("bb"))
    assert bench.routed(first, S0) == bench.routed(other, S1) == []
    bench.tokens(first, 0, "xy")
    again = admitted(bench.lost(S0))
    assert (again.work.request_id, again.work.attempt, ints(again.work.output_token_ids)) == ("a", 1, token_ids("xy"))
    assert again.work.handle != first.work.handle
    assert again.lost == (SchedulerIncarnation(S0, Incarnation(1)),)
    assert bench.tokens(first, 2, "z") == [], "the late words of the dead one"
    bench.routed(again, S1)
    bench.tokens(again, 2, "w", S1)
    assert [row[2:4] for row in bench.news()] == [(0, "xy"), (2, "w")]


def test_routed_to_a_scheduler_that_is_dead_already() -> None:
    """Two links, no order between them."""
    bench = Bench()
    bench.up(S0)
    first = admitted(bench.submit())
    assert bench.lost(S0) == []
    again = admitted(bench.routed(first, S0))
    assert (again.work.attempt, again.lost) == (1, (SchedulerIncarnation(S0, Incarnation(1)),))
    assert again.work.handle != first.work.handle
    assert bench.routed(first, S0) == [], "an old handle"
    bench.up(S0, 2)
    assert bench.routed(again, S0, 2) == []
    assert admitted(bench.lost(S0, 2)).work.attempt == 2


def test_routed_to_a_life_before_the_one_that_is_known() -> None:
    bench = Bench()
    first = admitted(bench.submit())
    bench.up(S0, 5)
    assert admitted(bench.routed(first, S0, 4)).lost == (SchedulerIncarnation(S0, Incarnation(4)),)


def test_a_scheduler_that_died_unseen_has_a_successor() -> None:
    """No session with the first life was ever open, so nobody says that it is lost."""
    bench = Bench()
    first = admitted(bench.submit())
    assert bench.routed(first, S0, 4) == []
    assert admitted(bench.up(S0, 5)).work.attempt == 1


def test_a_link_that_opens_again_with_the_same_life() -> None:
    bench = Bench()
    bench.up(S0)
    bench.lost(S0)
    bench.up(S0)
    assert bench.routed(admitted(bench.submit()), S0) == []


def test_tokens_may_come_before_routed() -> None:
    bench = Bench()
    first = admitted(bench.submit())
    bench.tokens(first, 0, "x")
    assert admitted(bench.lost(S0)).work.attempt == 1


@pytest.mark.parametrize("most", [MAX_DEATHS, 2])
def test_a_request_whose_schedulers_always_die_is_given_up(most: int) -> None:
    bench = Bench()
    bench.core.attempts.max_deaths = most
    effects = bench.submit()
    for life in range(1, most + 1):
        request = admitted(effects)
        bench.routed(request, S0, life)
        effects = bench.lost(S0, life)
    assert effects == []
    assert [row[4] for row in bench.news()] == [FinishReason.ERROR]
    assert not bench.core.journal.by_id


def test_a_request_that_gets_tokens_survives_any_number_of_deaths() -> None:
    bench = Bench()
    request = admitted(bench.submit(max_tokens=20))
    for life in range(1, 3 * MAX_DEATHS):
        bench.routed(request, S0, life)
        bench.tokens(request, life - 1, "x", life=life)
        request = admitted(bench.lost(S0, life))
        assert len(ints(request.work.output_token_ids)) == life
        bench.up(S0, life + 1)


def test_a_request_that_only_waits_outlives_deaths_over_minutes() -> None:
    bench = Bench()
    request = admitted(bench.submit())
    for life in range(1, 3 * MAX_DEATHS):
        bench.now = life * WINDOW_S / (MAX_DEATHS - 1)
        bench.routed(request, S0, life)
        request = admitted(bench.lost(S0, life))
        bench.up(S0, life + 1)
    assert bench.news() == []


def test_deaths_of_the_coordinator_do_not_add_to_those_of_schedulers() -> None:
    """Each may die so often within a minute, and none would end the mesh."""
    bench = Bench()
    request = admitted(bench.submit())
    for life in range(1, MAX_DEATHS):
        bench.lost(COORDINATOR, life)
        request = admitted(bench.up(COORDINATOR, life + 1))
    for life in range(1, MAX_DEATHS):
        bench.routed(request, S0, life)
        request = admitted(bench.lost(S0, life))
        bench.up(S0, life + 1)
    bench.lost(COORDINATOR, MAX_DEATHS)
    assert bench.up(COORDINATOR, MAX_DEATHS + 1) == []
    assert [row[4] for row in bench.news()] == [FinishReason.ERROR], "it may be what kills the coordinator"


def test_all_deaths_are_told_that_the_coordinator_may_not_know_of() -> None:
    """Two ranks die; it may hear of it later than we."""
    bench = Bench()
    bench.up(S0)
    bench.up(S1)
    bench.routed(admitted(bench.submit()), S0)
    bench.lost(S1)
    again = admitted(bench.lost(S0))
    assert set(again.lost) == {SchedulerIncarnation(S0, Incarnation(1)), SchedulerIncarnation(S1, Incarnation(1))}
    bench.up(S1, 2)
    assert admitted(bench.submit("bb")).lost == (
        SchedulerIncarnation(S1, Incarnation(1)),
        SchedulerIncarnation(S0, Incarnation(1)),
    )


# --- its rank gives a request back ---


def test_a_hand_off_is_an_attempt_that_says_so() -> None:
    bench = Bench()
    first = admitted(bench.submit())
    bench.routed(first, S0)
    bench.tokens(first, 0, "x")
    second = admitted(bench.says(COORDINATOR, Readmit((first.work.handle,), handed_off=True)))
    assert (second.work.attempt, len(second.work.output_token_ids), second.lost) == (1, 4, ())
    assert bench.core.counts.told().counters["request_retries"] == {"handed_off": 1}
    bench.routed(second, S1)
    bench.tokens(second, 1, "y", S1)
    assert "".join(row[3] for row in bench.news()) == "xy"


def test_what_was_given_back_is_admitted_again_as_often_as_need_be() -> None:
    bench = Bench()
    request = admitted(bench.submit())
    for attempt in range(1, 3 * MAX_DEATHS):
        bench.routed(request, S0)
        before = request.work.handle
        request = admitted(bench.says(COORDINATOR, Readmit((before, Handle(999)))))
        assert (request.work.attempt, request.lost) == (attempt, ()), "nobody died"
        assert request.work.handle != before
        assert bench.says(COORDINATOR, Readmit((before,))) == [], "said twice"
    bench.routed(request, S1)
    bench.tokens(request, 0, "x", S1)
    assert [row[3] for row in bench.news()] == ["x"]


def test_a_move_is_no_attempt_without_a_token() -> None:
    """Deaths count, with moves between them too; a token that came before a move clears them."""
    bench = Bench()
    request = admitted(bench.submit(max_tokens=20))
    for life in range(1, 3 * MAX_DEATHS):
        bench.routed(request, S0, life)
        if life % (MAX_DEATHS - 1) == 0:
            bench.tokens(request, len(ints(request.work.output_token_ids)), "x", life=life)
        request = admitted(bench.says(COORDINATOR, Readmit((request.work.handle,))))
        bench.routed(request, S0, life)
        request = admitted(bench.lost(S0, life))
        bench.up(S0, life + 1)
    bench = Bench()
    request = admitted(bench.submit())
    for life in range(1, MAX_DEATHS + 1):
        request = admitted(bench.says(COORDINATOR, Readmit((request.work.handle,))))
        bench.routed(request, S0, life)
        effects = bench.lost(S0, life)
        if life < MAX_DEATHS:
            request = admitted(effects)
            bench.up(S0, life + 1)
    assert effects == []
    assert [row[4] for row in bench.news()] == [FinishReason.ERROR]


def test_what_processes_died_with_in_hand_is_refused_alone() -> None:
    """A scheduler and the coordinator: each may have been killed by it. Who was only there has met no death."""
    bench = Bench()
    poison, other = admitted(bench.submit("p")), admitted(bench.submit("oo"))
    in_hand = (poison.work.request_id,)
    for request in (poison, other):
        bench.routed(request, S0)
    again = admits(bench.event(PeerLost(S0, Incarnation(1), in_hand)))
    assert {admit.work.request_id for admit in again} == {"p", "oo"}
    assert bench.news() == []
    assert bench.event(PeerLost(COORDINATOR, Incarnation(1), in_hand)) == []
    assert [(handle, end) for _, handle, _, _, end in bench.news()] == [(1, FinishReason.ERROR)]
    for life in range(2, 3 * MAX_DEATHS):
        sent = [one.message for one in bench.up(COORDINATOR, life) if isinstance(one, Send)]
        assert [one.work.request_id for one in sent if isinstance(one, Admit)] == ["oo"]
        assert [one for one in sent if isinstance(one, AbortRequests)] == [AbortRequests(in_hand)]
        bench.event(PeerLost(COORDINATOR, Incarnation(life), ("another's",)))
    assert bench.news() == []


def test_deaths_of_workers_go_with_a_request_until_its_next_token() -> None:
    bench = Bench()
    first = admitted(bench.submit())
    bench.routed(first, S0)
    moved = admitted(bench.says(COORDINATOR, Readmit((first.work.handle,), (2,))))
    assert moved.work.num_crashes == 2
    bench.routed(moved, S1)
    again = admitted(bench.lost(S1))
    assert again.work.num_crashes == 2
    bench.routed(again, S0)
    bench.tokens(again, 0, "x")
    assert admitted(bench.lost(S0)).work.num_crashes == 0


def test_a_request_that_is_moved_goes_on_after_its_tokens() -> None:
    bench = Bench()
    first = admitted(bench.submit())
    bench.routed(first, S0)
    bench.tokens(first, 0, "x")
    again = admitted(bench.says(COORDINATOR, Readmit((first.work.handle,))))
    assert ints(again.work.output_token_ids) == token_ids("x")
    bench.tokens(first, 1, "z")
    bench.tokens(again, 1, "y", S1)
    assert [row[3] for row in bench.news()] == ["x", "y"], "the old rank's late token finds nobody"


# --- the coordinator dies ---


def test_what_a_dead_coordinator_may_have_held_is_admitted_again() -> None:
    bench = Bench()
    first = admitted(bench.submit())
    assert bench.lost(COORDINATOR) == []
    again = admitted(bench.up(COORDINATOR, 2))
    assert (again.work.request_id, again.work.attempt, again.again) == (first.work.request_id, 1, False)
    assert again.work.handle != first.work.handle, "a rank may have the first one, and speak"
    assert bench.tokens(first, 0, "x") == []
    assert bench.news() == []


def test_what_comes_while_the_coordinator_is_away_is_admitted_once() -> None:
    bench = Bench(coordinator=0)
    assert bench.submit("a") == []
    assert admitted(bench.up(COORDINATOR)).work.attempt == 0
    bench.lost(COORDINATOR)
    assert bench.submit("bb") == []
    found = {request.work.request_id: request.work.attempt for request in admits(bench.up(COORDINATOR, 2))}
    assert found == {"a": 1, "bb": 0}


def test_a_scheduler_that_dies_while_the_coordinator_is_away() -> None:
    bench = Bench()
    bench.routed(admitted(bench.submit()), S0)
    bench.lost(COORDINATOR)
    assert bench.lost(S0) == []
    again = admitted(bench.up(COORDINATOR, 2))
    assert (again.work.attempt, again.lost) == (1, (SchedulerIncarnation(S0, Incarnation(1)),))


def test_routed_but_not_heard_of_is_asked_of_the_same_rank() -> None:
    """Assign may have died with the coordinator. The rank drops it if not."""
    bench = Bench()
    first = admitted(bench.submit())
    bench.routed(first, S1)
    bench.lost(COORDINATOR)
    again = admitted(bench.up(COORDINATOR, 2))
    assert again.work == first.work
    assert (again.dp_rank, again.again) == (1, True)
    assert bench.tokens(first, 0, "x", S1) == bench.routed(again, S1) == []
    assert [row[3] for row in bench.news()] == ["x"]


def test_what_runs_does_not_notice_a_new_coordinator() -> None:
    bench = Bench()
    first, second = admitted(bench.submit("a")), admitted(bench.submit("bb"))
    bench.routed(first, S0)
    bench.tokens(first, 0, "x")
    bench.tokens(second, 0, "x")  # Routed is lost with the coordinator
    bench.lost(COORDINATOR)
    handles = pack_i32([first.work.handle, second.work.handle])
    assert bench.up(COORDINATOR, 2) == [Send(S0, StillThere(handles))], "not admitted again"
    again = admits(bench.lost(S0))
    assert [(request.work.request_id, ints(request.work.output_token_ids)) for request in again] == [
        ("a", token_ids("x")),
        ("bb", token_ids("x")),
    ]


def test_whether_what_runs_was_given_back_is_asked_of_its_rank() -> None:
    """Readmit may have died with the coordinator, or with the coordinator's link to the rank."""
    bench = Bench()
    first, second, third = (admitted(bench.submit(name)) for name in ("a", "bb", "ccc"))
    bench.tokens(first, 0, "x")
    bench.tokens(second, 0, "x", S1)
    bench.routed(third, S1)
    bench.lost(COORDINATOR)
    asked = [one for one in bench.up(COORDINATOR, 2) if isinstance(one, Send) and isinstance(one.message, StillThere)]
    assert asked == [
        Send(S0, StillThere(pack_i32([first.work.handle]))),
        Send(S1, StillThere(pack_i32([second.work.handle]))),
    ]
    again = admitted(bench.says(S1, Readmit((second.work.handle,))))
    assert (again.work.request_id, ints(again.work.output_token_ids)) == ("bb", token_ids("x"))
    effects = bench.says(COORDINATOR, RankLost(SchedulerIncarnation(S0, Incarnation(1))), 2)
    assert effects == [Send(S0, StillThere(pack_i32([first.work.handle])))]
