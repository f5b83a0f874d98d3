"""The coordinator: members come, die and come back; requests are routed, and admitted again when a scheduler dies."""

import msgspec
from coordinator_bench import D0, D1, F0, F1, LIFE, S0, S1, S2, Bench, admit, assigned, load, member, only, stats, told

from meshlm.protocol.edges import control
from meshlm.protocol.edges.admit import AbortRequests, Assign, Refused, ReportLoad, Routed, SchedulerIncarnation
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import HEAD, ErrorKind, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.deaths import NEW_S
from meshlm.runtime.process.events import Send

# --- membership ---


def test_each_change_is_told_to_all_with_a_newer_epoch() -> None:
    bench = Bench()
    assert told(bench.join(F0)) == {F0: control.Members(bench.core._list().epoch, (member(F0),))}
    lists = told(bench.join(D0, ready=False))
    assert set(lists) == {F0, D0}
    assert {one.members for one in lists.values()} == {(member(F0), member(D0, ready=False))}
    later = told(bench.join(D0, ready=True))
    assert {one.members for one in later.values()} == {(member(F0), member(D0))}
    gone = told(bench.says(D0, control.Leave()))
    assert {to: one.members for to, one in gone.items()} == {F0: (member(F0),)}
    epochs = [one.epoch for one in (lists[F0], later[F0], gone[F0])]
    assert epochs == sorted(set(epochs))


def test_a_repeated_join_is_answered_to_its_sender_only() -> None:
    bench = Bench(F0, D0)
    epoch = bench.core.epoch
    assert set(told(bench.join(D0))) == {D0}
    assert bench.core.epoch == epoch


def test_an_older_life_is_not_heard() -> None:
    bench = Bench(F0)
    bench.join(S0, life=5)
    bench.says(S0, load(), life=5)
    assert bench.join(S0, life=4) == bench.lost(S0, life=4) == bench.says(S0, control.Leave(), life=4) == []
    bench.says(S0, load(num_running=9), life=4)
    assert bench.core.members[S0] == member(S0, 5)
    assert bench.core.ranks[S0].load == load()


def test_a_newer_life_replaces_the_older_one() -> None:
    bench = Bench(D0, S0)
    bench.says(D0, admit("a"))
    last = told(bench.join(S0, life=2))
    assert last[D0].members == (member(D0), member(S0, 2))
    assert bench.core.owner == {}
    assert bench.core.ranks[S0].incarnation == Incarnation(2)
    assert not bench.core.ranks[S0].serving, "it says by Load when it serves"
    assert bench.lost(S0, life=1) == [], "the late news of the older one's death"


def test_losing_a_stranger_is_no_news() -> None:
    assert Bench(D0).lost(S0) == []


# --- what frontends are told ---


def test_serving_needs_a_serving_rank_and_a_ready_detokenizer() -> None:
    bench = Bench(F0)
    bench.join(D0, ready=False)
    bench.join(S0)
    (said,) = stats(bench.tick())
    assert (said.serving, said.reason) == (False, "no scheduler with ready workers")
    assert stats(bench.says(S0, load(serving=False))) == []
    assert stats(bench.says(S0, load())) == []
    (said,) = stats(bench.tick())
    assert (said.serving, said.reason) == (False, "no detokenizer")
    (said,) = stats(bench.join(D0))
    assert (said.serving, said.reason) == (True, "")
    (said,) = stats(bench.lost(S0))
    assert (said.serving, said.ranks) == (False, ())


def test_a_new_frontend_hears_at_once_whether_requests_can_be_served() -> None:
    bench = Bench(D0, S0)
    sends = bench.join(F0)
    assert [send.to for send in only(sends, control.MeshStats)] == [F0]
    assert [said.serving for said in stats(sends)] == [True]
    assert [send.to for send in bench.join(F0, life=2) if isinstance(send.message, control.MeshStats)] == [F0]


def test_a_rank_whose_workers_die_serves_no_more() -> None:
    bench = Bench(F0, D0, S0)
    (said,) = stats(bench.says(S0, load(serving=False)))
    assert not said.serving
    assert bench.says(D0, admit("a")) == []
    assert len(bench.core.held) == 1


def test_stats_carry_the_ranks_figures_to_frontends_only() -> None:
    bench = Bench(F0, D0, S1)
    bench.says(S1, load(3, 2, 25, prefix_cache_queries=7, prefix_cache_hits=6, num_preemptions=1, generation_tokens=4))
    (send,) = bench.tick()
    assert send.to == F0
    assert isinstance(send.message, control.MeshStats)
    assert send.message.ranks == (control.RankStats(1, 3, 2, 0.75, 7, 6, 1, 0, 4, incarnation=LIFE),)


def test_stats_keep_the_graph_counts_of_a_rank() -> None:
    """A load brings them only where they have changed."""
    bench = Bench(F0, D0, S1)
    counts = control.GraphCounts({"decode": 3}, {"not_captured": 1})
    bench.says(S1, load(3, 2, 25, graphs=counts))
    bench.says(S1, load(4, 2, 25))
    (said,) = stats(bench.tick())
    assert said.ranks[0].graphs == counts


def test_a_link_that_does_not_move_is_told_to_every_frontend() -> None:
    """Each frontend knew of its own links alone: a scheduler's stuck link was seen nowhere."""
    bench, worker = Bench(F0, F1, D0, S0), Identity(Role.WORKER)
    bench.join(worker)
    sends = bench.says(worker, control.Blocked("one"))
    assert {send.to for send in only(sends, control.MeshStats)} == {F0, F1}
    assert {said.blocked for said in stats(sends)} == {"one"}
    assert {(said.serving, said.blocked) for said in stats(bench.tick())} == {(True, "one")}, (
        "requests are served still"
    )
    assert bench.says(worker, control.Blocked("one")) == []
    bench.says(D0, control.Blocked("two"))
    assert {said.blocked for said in stats(bench.says(worker, control.Blocked("")))} == {"two"}
    assert stats(bench.lost(D0))[-1].blocked == "", "its links went with it"
    bench.says(HEAD, control.Blocked("a supervisor, who is no member"))
    assert {said.blocked for said in stats(bench.lost(HEAD))} == {""}


def asked(sends: list[Send]) -> dict[Identity, int]:
    """The ranks that are to report, and the numbers of the questions."""
    return {send.to: send.message.number for send in sends if isinstance(send.message, ReportLoad)}


def answers(sends: list[Send]) -> list[tuple[Identity, int]]:
    """Who is told what it asked for: how many run in all ranks."""
    found = [(send.to, send.message) for send in sends if isinstance(send.message, control.MeshStats)]
    return [(to, sum(rank.num_running for rank in said.ranks)) for to, said in found if said.asked]


def test_a_frontend_that_asks_hears_when_every_rank_has_reported() -> None:
    """By then each has seen the aborts that were sent before; a rank that dies is not waited for."""
    bench = Bench(F0, D0, S0, S1, S2)
    number = asked(bench.says(F0, control.AskStats()))
    assert set(number) == {S0, S1, S2}
    assert answers(bench.says(S0, load(3, answers=number[S0]))) == []
    assert answers(bench.says(S1, load(4))) == [], "sent before it was asked"
    assert answers(bench.says(S1, load(5, answers=number[S1]))) == []
    assert answers(bench.lost(S2)) == [(F0, 8)]
    assert answers(bench.says(S1, load(6, answers=number[S1]))) == [], "once"


def test_a_newer_question_takes_the_place_of_the_older() -> None:
    bench = Bench(F0, D0, S0)
    (older,) = asked(bench.says(F0, control.AskStats())).values()
    (newer,) = asked(bench.says(F0, control.AskStats())).values()
    assert answers(bench.says(S0, load(1, answers=older))) == []
    assert answers(bench.says(S0, load(2, answers=newer))) == [(F0, 2)]
    bench.lost(S0)
    assert answers(bench.says(F0, control.AskStats())) == [(F0, 0)], "no rank is there"


def test_stats_count_what_is_held() -> None:
    bench = Bench(F0, D0)
    for name in "ab":
        bench.says(D0, admit(name))
    (said,) = stats(bench.tick())
    assert said.num_held == 2
    bench.join(S0)
    bench.says(S0, load())
    (said,) = stats(bench.tick())
    assert said.num_held == 0


# --- routing ---


def test_an_admitted_request_is_assigned_and_its_detokenizer_told() -> None:
    bench = Bench(D0, S0)
    request = admit("a", handle=5)
    assert bench.says(D0, request) == [Send(S0, Assign(request.work, D0, LIFE)), Send(D0, Routed(Handle(5), S0, LIFE))]
    assert bench.core.owner == {"a": S0}
    bench.says(S0, load(ended=(RequestId("a"), RequestId("unknown"))))
    assert bench.core.owner == {}
    assert bench.core.ranks[S0].requests == {}


def test_the_least_loaded_rank_gets_it() -> None:
    bench = Bench(D0, S1, S0, S2)
    assert [assigned(bench, admit(str(n))) for n in range(6)] == [S0, S1, S2, S0, S1, S2]
    bench.says(S1, load(ended=(RequestId("1"), RequestId("4"))))
    assert [assigned(bench, admit(str(n))) for n in (6, 7, 8)] == [S1, S1, S0]


def test_long_requests_and_a_full_cache_count() -> None:
    bench = Bench(D0, S0, S1)
    assert assigned(bench, admit("long answer", max_tokens=500)) == S0
    assert [assigned(bench, admit(str(n), max_tokens=100)) for n in range(4)] == [S1] * 4
    bench.says(S1, load(free=0))  # as much as 2,000 tokens to be decoded
    assert [assigned(bench, admit(str(n), max_tokens=100)) for n in range(4, 8)] == [S0] * 4


def test_a_wanted_rank_is_respected() -> None:
    bench = Bench(D0, S0, S1)
    assert [assigned(bench, admit(str(n), dp_rank=1)) for n in range(3)] == [S1] * 3


def test_a_rank_that_does_not_serve_gets_nothing() -> None:
    bench = Bench(D0, S0, S1)
    bench.join(S2)  # no Load yet
    bench.says(S0, load(serving=False))
    assert {assigned(bench, admit(str(n))) for n in range(4)} == {S1}


# --- resumes and aborts ---


def test_after_a_schedulers_death_its_requests_are_admitted_again() -> None:
    bench = Bench(D0, S0, S1)
    assert assigned(bench, admit("a", handle=1)) == S0
    assert assigned(bench, admit("b", handle=2)) == S1
    sends = bench.lost(S0)
    assert set(told(sends)) == {D0, S1}
    assert only(sends, Assign) == [], "the journal is the detokenizer's"
    assert bench.core.owner == {"b": S1}
    again = admit("a", handle=3, attempt=1, output_token_ids=pack_i32([7, 8]))
    assert bench.says(D0, again) == [Send(S1, Assign(again.work, D0, LIFE)), Send(D0, Routed(Handle(3), S1, LIFE))]


def test_a_request_admitted_again_leaves_its_old_rank() -> None:
    """Its detokenizer was replaced, its scheduler lives."""
    bench = Bench(D0, S0, S1)
    assert assigned(bench, admit("a", max_tokens=50)) == S0
    assert assigned(bench, admit("a", attempt=1), sender=D1) == S1
    assert bench.core.owner == {"a": S1}
    assert bench.core.ranks[S0].score == 0
    bench.says(S0, load(ended=(RequestId("a"),)))
    assert bench.core.owner == {"a": S1}, "the old rank's end is not the new one's"


def test_a_request_admitted_again_ends_where_it_was() -> None:
    """Two ranks never have it."""
    bench = Bench(D0, S0, S1)
    assert assigned(bench, admit("a", max_tokens=50)) == S0
    sends = bench.says(D1, admit("a", attempt=1))
    assert [(send.to, type(send.message)) for send in sends] == [(S0, AbortRequests), (S1, Assign), (D1, Routed)]
    assert aborted(sends) == {S0: {"a"}}
    same_rank = bench.says(D1, admit("a", attempt=2, dp_rank=1))
    assert aborted(same_rank) == {}, "the rank itself replaces the older attempt"


def test_a_new_coordinator_ends_older_attempts_that_it_does_not_know_of() -> None:
    bench = Bench(D0, S0, S1, S2)
    sends = bench.says(D0, admit("a", attempt=1, dp_rank=1))
    assert aborted(sends) == {S0: {"a"}, S2: {"a"}}
    assert [send.to for send in only(sends, Assign)] == [S1]
    assert aborted(bench.says(D0, admit("b", dp_rank=1))) == {}


def test_a_scheduler_that_its_detokenizer_saw_die_is_not_chosen() -> None:
    bench = Bench(D0, S0, S1)
    dead = SchedulerIncarnation(S0, LIFE)
    assert assigned(bench, msgspec.structs.replace(admit("a", attempt=1), lost=(dead,))) == S1
    bench.lost(S1)
    held = msgspec.structs.replace(admit("b", attempt=1), lost=(dead,))
    assert only(bench.says(D0, held), Assign) == [], "the news of its death must come soon"
    assert assigned(bench, admit("c")) == S0, "others do not know"
    bench.join(S0, life=2)
    assert [send.to for send in only(bench.says(S0, load(), life=2), Assign)] == [S0]


def test_a_held_request_admitted_again_is_held_once() -> None:
    bench = Bench(D0)
    bench.says(D0, admit("a", handle=1))
    bench.says(D0, admit("a", handle=2, attempt=1))
    bench.join(S0)
    (send,) = only(bench.says(S0, load()), Routed)
    assert isinstance(send.message, Routed)
    assert send.message.handle == 2


def test_admitted_twice_at_one_rank_counts_once() -> None:
    bench = Bench(D0, S0)
    assert [assigned(bench, admit("a", attempt=n)) for n in range(3)] == [S0] * 3
    assert bench.core.ranks[S0].decode_tokens == 10


def test_the_last_ranks_death_holds_what_comes_until_it_is_back() -> None:
    bench = Bench(F0, D0, S0)
    bench.says(D0, admit("a"))
    bench.lost(S0)
    assert only(bench.says(D0, admit("a", attempt=1)), Assign) == []
    bench.join(S0, life=2)
    sends = bench.says(S0, load(), life=2)
    assert [said.serving for said in stats(sends)] == [True]
    (send,) = only(sends, Assign)
    assert isinstance(send.message, Assign)
    assert send.message.work.attempt == 1
    assert [send.message for send in only(sends, Routed)] == [Routed(Handle(1), S0, Incarnation(2))]


def aborted(sends: list[Send]) -> dict[Identity, set[str]]:
    return {send.to: set(send.message.request_ids) for send in sends if isinstance(send.message, AbortRequests)}


def test_an_abort_goes_where_the_request_went() -> None:
    bench = Bench(D0, S0, S1)
    owners = {name: assigned(bench, admit(name)) for name in "abcd"}
    assert owners == {"a": S0, "b": S1, "c": S0, "d": S1}
    sends = bench.says(D0, AbortRequests(tuple(map(RequestId, "abc"))))
    assert aborted(sends) == {S0: {"a", "c"}, S1: {"b"}}
    assert len(sends) == 2


def test_aborts_keep_their_order() -> None:
    bench = Bench(D0, S0)
    names = tuple(RequestId(f"r{number}") for number in range(20))
    for name in names:
        bench.says(D0, admit(name))
    assert bench.says(D0, AbortRequests(names)) == [Send(S0, AbortRequests(names))]


def test_an_abort_of_a_held_request_ends_its_waiting() -> None:
    bench = Bench(D0)
    bench.says(D0, admit("a"))
    bench.says(D0, admit("b"))
    assert bench.says(D0, AbortRequests((RequestId("a"),))) == []
    bench.join(S0)
    (send,) = only(bench.says(S0, load()), Assign)
    assert isinstance(send.message, Assign)
    assert send.message.work.request_id == "b"


def test_an_abort_of_an_unknown_request_asks_every_rank() -> None:
    """A coordinator that was restarted knows no owners."""
    bench = Bench(D0, S0, S1)
    sends = bench.says(D0, AbortRequests((RequestId("a"), RequestId("b"))))
    assert aborted(sends) == {S0: {"a", "b"}, S1: {"a", "b"}}


def test_a_dead_detokenizers_held_requests_are_dropped() -> None:
    bench = Bench(D0, D1)
    bench.says(D0, admit("a", handle=1))
    bench.says(D1, admit("b", handle=1))
    bench.lost(D0)
    bench.join(D0, life=2)
    refused = only(bench.tick(NEW_S), Refused)
    assert [send.to for send in refused] == [D1]


def test_an_assignment_that_no_frame_holds_is_refused() -> None:
    """No rank has it, and none is waited for."""
    bench = Bench(D0, S0)
    (assign, *_) = [send.message for send in bench.says(D0, admit("a", handle=7)) if isinstance(send.message, Assign)]
    refused = bench.core.too_long(assign, "too long")
    bench.core.check()
    assert refused == Refused(Handle(7), ErrorKind.INTERNAL, "too long")
    assert not bench.core.owner
