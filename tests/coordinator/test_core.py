"""The coordinator: members come, die and come back; requests are routed, held, refused, resumed."""

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from meshlm.coordinator.core import HOLD_S, RESUME_HOLD_S, SUPERVISOR, Coordinator
from meshlm.coordinator.events import PeerLost, Received, Send, Tick
from meshlm.protocol import control_edge as control
from meshlm.protocol.admit_edge import (
    AbortRequests,
    Admit,
    Assign,
    GiveBack,
    Load,
    Readmit,
    Refused,
    Returned,
    Routed,
    SchedulerLife,
    Started,
    Work,
)
from meshlm.protocol.columns import pack_i32
from meshlm.protocol.ids import ErrorKind, Handle, Identity, Incarnation, RequestId, Role
from meshlm.protocol.sampling import SamplingParams

F0, D0, D1 = Identity(Role.FRONTEND), Identity(Role.DETOKENIZER), Identity(Role.DETOKENIZER, 1)
S0, S1, S2 = (Identity(Role.SCHEDULER, index) for index in range(3))
LIFE = Incarnation(1)
WALL_S = 1.75e9


def admit(name: str, prompt_len: int = 10, max_tokens: int = 10, handle: int = 1, **more: object) -> Admit:
    dp_rank = more.pop("dp_rank", -1)
    assert isinstance(dp_rank, int)
    prompt, sampling = pack_i32(range(prompt_len)), SamplingParams(max_tokens=max_tokens)
    return Admit(Work(RequestId(name), Handle(handle), prompt, sampling, **more), dp_rank)  # type: ignore[arg-type]


def load(num_running: int = 0, num_waiting: int = 0, free: int = 100, **more: object) -> Load:
    return Load(num_running, num_waiting, 100, free, 0, **more)  # type: ignore[arg-type]


def member(identity: Identity, life: int = LIFE, ready: bool = True) -> control.Member:
    return control.Member(identity, Incarnation(life), f"ipc:///{identity}-{life}", ready)


class Bench:
    """A coordinator, a clock, and a check after every event."""

    def __init__(self, *identities: Identity, max_waiting: int = 100, num_ranks: int = 3) -> None:
        self.core = Coordinator(max_waiting, num_ranks)
        self.now = 0.0
        for identity in identities:
            self.join(identity)
            if identity.role is Role.SCHEDULER:
                self.says(identity, load())

    def event(self, event: Received | PeerLost | Tick) -> list[Send]:
        sends = self.core.handle(event, self.now)
        self.core.check()
        return sends

    def says(self, sender: Identity, message: Struct, life: int = LIFE) -> list[Send]:
        return self.event(Received(sender, Incarnation(life), message))

    def join(self, identity: Identity, life: int = LIFE, ready: bool = True) -> list[Send]:
        return self.says(identity, control.Join(member(identity, life, ready)), life)

    def lost(self, identity: Identity, life: int = LIFE) -> list[Send]:
        return self.event(PeerLost(identity, Incarnation(life)))

    def tick(self, later_s: float = 1.0) -> list[Send]:
        self.now += later_s
        return self.event(Tick(WALL_S + self.now))


def only(sends: list[Send], kind: type[Struct]) -> list[Send]:
    return [send for send in sends if isinstance(send.message, kind)]


def told(sends: list[Send]) -> dict[Identity, control.Members]:
    return {send.to: send.message for send in sends if isinstance(send.message, control.Members)}


def stats(sends: list[Send]) -> list[control.MeshStats]:
    return [send.message for send in sends if isinstance(send.message, control.MeshStats)]


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
    assert bench.core.ranks[S0].life == SchedulerLife(S0, Incarnation(2))
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
    assert send.message.ranks == (control.RankStats(1, 3, 2, 0.75, 7, 6, 1, 0, 4),)


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
    assert bench.says(D0, request) == [
        Send(S0, Assign(request.work, D0, LIFE)),
        Send(D0, Routed(Handle(5), S0, LIFE)),
    ]
    assert bench.core.owner == {"a": S0}
    bench.says(S0, load(ended=(RequestId("a"), RequestId("unknown"))))
    assert bench.core.owner == {}
    assert bench.core.ranks[S0].requests == {}


def assigned(bench: Bench, request: Admit, sender: Identity = D0) -> Identity | None:
    found = only(bench.says(sender, request), Assign)
    return found[0].to if found else None


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


# --- holding and refusing ---


def test_requests_wait_for_a_rank_and_go_in_order() -> None:
    bench = Bench(D0)
    for name in "abc":
        assert bench.says(D0, admit(name)) == []
    bench.join(S0)
    assert only(bench.says(S0, load(serving=False)), Assign) == []
    sends = only(bench.says(S0, load()), Assign)
    assert [send.message.work.request_id for send in sends if isinstance(send.message, Assign)] == ["a", "b", "c"]
    assert not bench.core.held


def test_a_rank_that_never_comes_is_a_refusal_in_words() -> None:
    bench = Bench(D0)
    bench.says(D0, admit("a", handle=1))
    bench.now = 1.0
    bench.says(D0, admit("b", handle=2))
    assert only(bench.tick(HOLD_S - 1.5), Refused) == []
    (send,) = only(bench.tick(0.5), Refused)
    assert send.to == D0
    assert send.message == Refused(Handle(1), ErrorKind.OVERLOADED, "no scheduler was ready within 60 s")
    (send,) = only(bench.tick(1.0), Refused)
    assert isinstance(send.message, Refused)
    assert send.message.handle == 2
    assert only(bench.tick(HOLD_S), Refused) == []


def test_a_stream_that_ran_already_waits_longer_for_a_rank() -> None:
    bench = Bench(D0)
    bench.says(D0, admit("a", attempt=1))
    assert only(bench.tick(RESUME_HOLD_S - 1.0), Refused) == []
    (send,) = only(bench.tick(1.0), Refused)
    assert isinstance(send.message, Refused)
    assert "600 s" in send.message.message


def test_a_request_for_a_rank_of_its_own_waits_while_others_serve() -> None:
    bench = Bench(D0, S0)
    assert bench.says(D0, admit("a", dp_rank=1)) == []
    assert len(bench.core.held) == 1
    assert assigned(bench, admit("b")) == S0


def test_a_request_for_a_rank_of_its_own_goes_when_that_rank_serves() -> None:
    bench = Bench(D0, S0)
    bench.says(D0, admit("a", dp_rank=1))
    bench.join(S1)
    assert [send.to for send in only(bench.says(S1, load()), Assign)] == [S1]


def test_a_rank_that_comes_back_releases_what_waits_for_it_only() -> None:
    bench = Bench(D0, S0, S1)
    bench.says(S1, load(serving=False))
    for name, dp_rank in (("a", 2), ("b", 1), ("c", 1)):
        assert bench.says(D0, admit(name, dp_rank=dp_rank)) == []
    sends = only(bench.says(S1, load()), Assign)
    assert [(send.to, send.message.work.request_id) for send in sends if isinstance(send.message, Assign)] == [
        (S1, "b"),
        (S1, "c"),
    ]
    assert list(bench.core.held) == ["a"]


@pytest.mark.parametrize("ranks", [(), (S0,), (S0, S1)])
def test_a_rank_that_does_not_exist_is_refused_at_once(ranks: tuple[Identity, ...]) -> None:
    """Which ones exist is configured: one that is being started again is waited for."""
    bench = Bench(D0, *ranks, num_ranks=2)
    (send,) = bench.says(D0, admit("a", dp_rank=2, handle=9))
    text = "X-data-parallel-rank: there is no rank 2; this mesh has ranks 0 to 1"
    assert send == Send(D0, Refused(Handle(9), ErrorKind.INVALID, text, "X-data-parallel-rank"))
    assert not bench.core.held
    (send,) = Bench(D0, num_ranks=1).says(D0, admit("a", dp_rank=1))
    assert isinstance(send.message, Refused)
    assert send.message.message.endswith("this mesh has rank 0 only")


def test_a_rank_of_its_own_that_never_serves_is_named() -> None:
    bench = Bench(D0, S0)
    bench.says(D0, admit("a", dp_rank=1))
    (send,) = only(bench.tick(HOLD_S), Refused)
    assert isinstance(send.message, Refused)
    assert send.message.message == "no scheduler of rank 1 was ready within 60 s"


def test_a_held_request_is_refused_at_its_deadline() -> None:
    bench = Bench(D0)
    bench.says(D0, admit("patient", handle=1, deadline_s=WALL_S + 30))
    bench.says(D0, admit("hasty", handle=2, deadline_s=WALL_S + 2))
    bench.says(D0, admit("whenever", handle=3))
    assert only(bench.tick(1.5), Refused) == []
    (send,) = only(bench.tick(0.5), Refused)
    assert send == Send(D0, Refused(Handle(2), ErrorKind.TIMEOUT, "the request's timeout passed"))
    assert list(bench.core.held) == ["patient", "whenever"]


def test_the_queue_is_full() -> None:
    bench = Bench(D0, max_waiting=2)
    for name in "ab":
        assert bench.says(D0, admit(name)) == []
    (send,) = bench.says(D0, admit("c", handle=9))
    assert send.to == D0
    assert send.message == Refused(Handle(9), ErrorKind.OVERLOADED, "2 requests are waiting already (--max-waiting)")
    assert len(bench.core.held) == 2
    bench.says(D0, AbortRequests((RequestId("a"),)))
    assert bench.says(D0, admit("d")) == []


def test_what_waits_in_the_schedulers_counts() -> None:
    bench = Bench(D0, S0, S1, max_waiting=5)
    bench.says(S0, load(num_waiting=3))
    assert assigned(bench, admit("a")) is not None
    bench.says(S1, load(num_waiting=2))
    (send,) = bench.says(D0, admit("b"))
    assert isinstance(send.message, Refused)
    assert "b" not in bench.core.owner
    bench.says(S0, load(num_waiting=2))
    assert assigned(bench, admit("b")) is not None


def test_all_held_requests_go_though_they_filled_the_queue() -> None:
    bench = Bench(D0, max_waiting=3)
    for name in "abc":
        bench.says(D0, admit(name))
    bench.join(S0)
    assert len(only(bench.says(S0, load()), Assign)) == 3


def test_a_running_stream_is_not_refused_because_the_queue_is_full() -> None:
    """DESIGN 3: kill -9 of any one process is invisible to a streaming client except as a pause."""
    bench = Bench(D0, S0, max_waiting=2)
    names = "abcd"
    for name in names:
        assert assigned(bench, admit(name)) == S0
    bench.lost(S0)
    again = [bench.says(D0, admit(name, attempt=1, emitted=pack_i32([1]))) for name in names]
    assert [only(sends, Refused) for sends in again] == [[], [], [], []]


def test_what_was_let_in_before_is_not_refused_because_the_queue_is_full() -> None:
    bench = Bench(D0, S0, max_waiting=2)
    bench.says(S0, load(num_waiting=2))
    (send,) = bench.says(D0, admit("new"))
    assert isinstance(send.message, Refused)
    assert assigned(bench, admit("another attempt", attempt=1)) == S0
    assert assigned(bench, admit("a resume of its client", emitted=pack_i32([1]))) == S0
    routed_before = msgspec.structs.replace(admit("routed before", dp_rank=0), again=True)
    assert assigned(bench, routed_before) == S0


def test_held_requests_go_though_the_schedulers_queues_are_full() -> None:
    bench = Bench(D0, max_waiting=3)
    for name in "abc":
        bench.says(D0, admit(name))
    bench.join(S0)
    assert len(only(bench.says(S0, load(num_waiting=3)), Assign)) == 3


# --- resumes and aborts ---


def test_after_a_schedulers_death_its_requests_are_admitted_again() -> None:
    bench = Bench(D0, S0, S1)
    assert assigned(bench, admit("a", handle=1)) == S0
    assert assigned(bench, admit("b", handle=2)) == S1
    sends = bench.lost(S0)
    assert set(told(sends)) == {D0, S1}
    assert only(sends, Assign) == [], "the journal is the detokenizer's"
    assert bench.core.owner == {"b": S1}
    again = admit("a", handle=3, attempt=1, emitted=pack_i32([7, 8]))
    assert bench.says(D0, again) == [
        Send(S1, Assign(again.work, D0, LIFE)),
        Send(D0, Routed(Handle(3), S1, LIFE)),
    ]


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
    dead = SchedulerLife(S0, LIFE)
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
    refused = only(bench.tick(HOLD_S), Refused)
    assert [send.to for send in refused] == [D1]


# --- moving ---


def back(name: str, attempt: int = 0, handle: int = 1, num_crashes: int = 0) -> Returned:
    return Returned(RequestId(name), attempt, Handle(handle), D0, LIFE, num_crashes)


def test_a_new_rank_takes_what_waits_behind_a_full_one() -> None:
    bench = Bench(D0, S0)
    for number in range(8):
        bench.says(D0, admit(f"r{number}", handle=number, max_tokens=100))
    begun = tuple(Started(RequestId(f"r{number}"), 0) for number in range(2))
    assert only(bench.says(S0, load(2, 6, started=begun)), GiveBack) == []
    bench.join(S1)
    (ask,) = only(bench.says(S1, load(free=90)), GiveBack)
    assert ask == Send(S0, GiveBack(tuple(RequestId(f"r{number}") for number in (7, 6, 5, 4))))
    assert only(bench.tick(), GiveBack) == [], "it was asked"
    (told,) = only(bench.says(S0, load(2, 3, returned=(back("r7", 0, 7), back("r6", 0, 6)))), Readmit)
    assert told == Send(D0, Readmit((Handle(7), Handle(6))))
    assert set(bench.core.owner) == {f"r{number}" for number in range(6)}
    sends = bench.says(D0, admit("r7", handle=9, attempt=1, max_tokens=100))
    assert [(send.to, type(send.message)) for send in sends] == [(S1, Assign), (D0, Routed)], "nobody else has it"


def test_what_its_client_sent_to_a_rank_stays_there() -> None:
    bench = Bench(D0, S0, S1)
    for number in range(8):
        bench.says(D0, admit(f"r{number}", dp_rank=0, max_tokens=100))
    bench.says(S0, load(1, 7))
    assert only(bench.tick(), GiveBack) == []


def test_what_ran_without_workers_moves_to_a_rank_with_room() -> None:
    bench = Bench(D0, S0)
    for number in range(4):
        bench.says(D0, admit(f"r{number}", prompt_len=100, handle=number, max_tokens=100))
    bench.says(D0, admit("pinned", dp_rank=0))
    begun = tuple(Started(RequestId(f"r{number}"), 0) for number in range(3))
    bench.says(S0, load(3, 2, started=begun, live_tokens=500))
    assert only(bench.says(S0, load(0, 5, serving=False, live_tokens=500)), GiveBack) == [], "there is no other"
    bench.join(S1)
    # Each is about 100 tokens of the prompt and 100 that it got; S1 has room for two of them.
    (ask,) = only(bench.says(S1, load(free=25)), GiveBack)
    assert ask == Send(S0, GiveBack((RequestId("r0"), RequestId("r1"))))
    assert only(bench.tick(), GiveBack) == [], "it was asked"
    returned = (back("r0", 0, 0, num_crashes=1), back("r1", 0, 1))
    (told,) = only(bench.says(S0, load(0, 3, serving=False, returned=returned, live_tokens=300)), Readmit)
    assert told == Send(D0, Readmit((Handle(0), Handle(1)), (1, 0)))
    sends = bench.says(D0, admit("r0", prompt_len=200, handle=9, attempt=1))
    assert [(send.to, type(send.message)) for send in sends] == [(S1, Assign), (D0, Routed)], "nobody else has it"
    assert assigned(bench, admit("r1", prompt_len=200, handle=10, attempt=1)) == S1
    assert only(bench.tick(), GiveBack) == [], "their prompts fill it now"
    bench.says(S1, load(2, 0, free=2, started=(Started(RequestId("r0"), 0), Started(RequestId("r1"), 0))))
    assert only(bench.tick(), GiveBack) == []
    bench.says(S1, load(0, 0, ended=(RequestId("r0"), RequestId("r1"))))
    (ask,) = only(bench.tick(), GiveBack)
    assert ask == Send(S0, GiveBack((RequestId("r2"), RequestId("r3")))), "not what its client wants there"
    bench.says(S0, load(3, 0))
    assert not bench.core.moving, "its workers came back before it was asked"


def test_behind_a_queue_nothing_is_moved_from_a_rank_without_workers() -> None:
    bench = Bench(D0, S0, S1)
    assert assigned(bench, admit("a")) == S0
    bench.says(S1, load(1, 1))
    assert only(bench.says(S0, load(0, 1, serving=False)), GiveBack) == []
    bench.now += 1
    assert only(bench.says(S1, load(1, 0)), GiveBack) == [Send(S0, GiveBack((RequestId("a"),)))]


def test_a_rank_that_leaves_gives_back_all_when_its_workers_are_gone() -> None:
    bench = Bench(D0, S0, S1, num_ranks=2)
    assert assigned(bench, admit("a", dp_rank=1)) == S1
    bench.says(S1, load(1, 0, started=(Started(RequestId("a"), 0),)))
    bench.says(SUPERVISOR, control.SetRanks(1))
    assert Send(S1, GiveBack((), everything=True)) in bench.says(S1, load(0, 1, serving=False))


def test_a_removed_rank_gets_nothing_new_and_gives_back_what_waits() -> None:
    bench = Bench(D0, S0, S1, num_ranks=2)
    assert assigned(bench, admit("running", dp_rank=1)) == S1
    assert assigned(bench, admit("waiting", dp_rank=1, handle=5)) == S1
    sends = bench.says(SUPERVISOR, control.SetRanks(1))
    assert sends == [Send(S1, GiveBack((), everything=True))]
    assert assigned(bench, admit("new")) == S0
    (told,) = only(bench.says(S1, load(1, 0, returned=(back("waiting", 0, 5),))), Readmit)
    assert told == Send(D0, Readmit((Handle(5),)))
    assert assigned(bench, admit("waiting", attempt=1, dp_rank=1)) == S0, "its rank is no more, and it was let in"
    (refused,) = bench.says(D0, admit("late", dp_rank=1))
    assert isinstance(refused.message, Refused)
    drained = control.RankDrained(1)
    assert [send.message for send in bench.says(S1, load(ended=(RequestId("running"),)))] == [drained]
    assert [send.message for send in only(bench.tick(), control.RankDrained)] == [drained], "until it is gone"
    bench.lost(S1)
    assert only(bench.tick(), control.RankDrained) == []


def test_a_new_coordinator_goes_on_draining() -> None:
    bench = Bench(D0, S0, num_ranks=1)
    bench.join(S1)
    (ask,) = only(bench.says(S1, load(1, 2)), GiveBack)
    assert ask == Send(S1, GiveBack((), everything=True))
    (told,) = only(bench.says(S1, load(1, 0, returned=(back("stranger", 0, 4),))), Readmit)
    assert told == Send(D0, Readmit((Handle(4),)))


def test_a_rank_may_stay_after_all() -> None:
    bench = Bench(D0, S0, S1, num_ranks=2)
    bench.says(SUPERVISOR, control.SetRanks(1))
    bench.says(SUPERVISOR, control.SetRanks(2))
    assert [assigned(bench, admit(str(number))) for number in range(2)] == [S0, S1]


def test_ranks_may_be_numbered_from_another_mesh_on() -> None:
    bench = Bench(F0, D0, S0, S1)
    bench.core.num_ranks, bench.core.first_rank = 2, 4
    assert assigned(bench, admit("a", dp_rank=5)) == S1
    (refused,) = bench.says(D0, admit("b", dp_rank=1))
    assert isinstance(refused.message, Refused)
    assert "ranks 4 to 5" in refused.message.message
    assert assigned(bench, msgspec.structs.replace(admit("c", dp_rank=1), again=True)) == S1, "a scheduler's own number"
    (said,) = stats(bench.tick())
    assert [rank.dp_rank for rank in said.ranks] == [4, 5]


# --- any history ---


@dataclass
class Fake:
    """One scheduler: what it was assigned and has not ended."""

    life: int
    requests: dict[str, int] = field(default_factory=dict)  # request -> attempt
    ended: list[RequestId] = field(default_factory=list)
    started: set[str] = field(default_factory=set)
    serving: bool = True


class Mesh(Bench):
    """Fake schedulers and one detokenizer that admits again what a dead scheduler had."""

    def __init__(self) -> None:
        super().__init__(F0, D0, max_waiting=6)
        self.schedulers: dict[Identity, Fake] = {}
        self.open: dict[str, Admit] = {}
        self.routed: dict[str, tuple[Identity, int]] = {}
        self.finished: set[str] = set()
        self.refused: set[str] = set()
        self.num_handles = 0
        self.asked: list[tuple[Identity, int, GiveBack]] = []
        self.readmitted: list[Handle] = []

    def event(self, event: Received | PeerLost | Tick) -> list[Send]:
        sends = super().event(event)
        for send in sends:
            assert send.to in self.core.members or send.to == SUPERVISOR, "a message to nobody"
            match send.message:
                case Assign() as assign:
                    fake, work = self.schedulers[send.to], assign.work
                    assert not any(work.request_id in other.requests for other in self.schedulers.values())
                    fake.requests[work.request_id] = work.attempt
                case Routed() as routed:
                    (name,) = [name for name, one in self.open.items() if one.work.handle == routed.handle]
                    assert self.schedulers[routed.scheduler].requests[name] == self.open[name].work.attempt
                    assert self.schedulers[routed.scheduler].life == routed.incarnation
                    self.routed[name] = (routed.scheduler, routed.incarnation)
                case Refused() as refused:
                    (name,) = [name for name, one in self.open.items() if one.work.handle == refused.handle]
                    assert name not in self.routed
                    del self.open[name]
                    self.refused.add(name)
                case AbortRequests() as abort:
                    for name in abort.request_ids:
                        if self.schedulers[send.to].requests.pop(name, None) is not None:
                            self.schedulers[send.to].ended.append(name)
                case GiveBack() as ask:
                    self.asked.append((send.to, self.schedulers[send.to].life, ask))
                case Readmit() as readmit:
                    self.readmitted += readmit.handles
        return sends

    def give_back(self) -> None:
        """What the schedulers were asked to give back comes back, less what has started meanwhile."""
        asked, self.asked = self.asked, []
        for identity, life, ask in asked:
            fake = self.schedulers.get(identity)
            if fake is None or fake.life != life:
                continue
            returned = []
            for name in list(fake.requests) if ask.everything else ask.request_ids:
                if name in fake.requests and (name not in fake.started or not fake.serving):
                    fake.started.discard(name)
                    attempt, handle = fake.requests.pop(name), self.open[name].work.handle
                    returned.append(Returned(RequestId(name), attempt, handle, D0, LIFE))
            self.report(identity, fake.serving, returned=tuple(returned))
        self.readmit()

    def readmit(self) -> None:
        handles, self.readmitted = self.readmitted, []
        for name, one in list(self.open.items()):
            if one.work.handle in handles:
                self.routed.pop(name, None)
                self.submit(name, one.work.attempt + 1, one.dp_rank)

    def begin(self, identity: Identity) -> None:
        """Some of its requests get their first token."""
        fake = self.schedulers[identity]
        new = [name for name in fake.requests if name not in fake.started][:2]
        fake.started.update(new)
        self.report(identity, started=tuple(Started(RequestId(name), 0) for name in new))

    def submit(self, name: str, attempt: int, dp_rank: int) -> None:
        self.num_handles += 1
        request = admit(name, handle=self.num_handles, attempt=attempt, dp_rank=dp_rank)
        self.open[name] = request
        self.says(D0, request)

    def start(self, identity: Identity) -> None:
        if identity not in self.schedulers:
            self.now += 1
            self.schedulers[identity] = fake = Fake(int(self.now * 10))
            self.join(identity, fake.life)
            self.report(identity)

    def report(self, identity: Identity, serving: bool = True, **more: object) -> None:
        fake = self.schedulers[identity]
        fake.serving = serving
        ended, fake.ended = tuple(fake.ended), []
        num_running = len(fake.started & set(fake.requests))
        num_waiting = len(fake.requests) - num_running
        self.says(identity, load(num_running, num_waiting, ended=ended, serving=serving, **more), fake.life)

    def kill(self, identity: Identity) -> None:
        fake = self.schedulers.pop(identity, None)
        if fake is None:
            return
        self.lost(identity, fake.life)
        for name, (scheduler, life) in list(self.routed.items()):
            if (scheduler, life) == (identity, fake.life):
                del self.routed[name]
                self.submit(name, self.open[name].work.attempt + 1, self.open[name].dp_rank)

    def finish(self, identity: Identity) -> None:
        fake = self.schedulers[identity]
        if fake.requests:
            name, _ = fake.requests.popitem()
            fake.ended.append(RequestId(name))
            del self.open[name], self.routed[name]
            self.finished.add(name)
        self.report(identity)

    def abort(self, name: str) -> None:
        self.open.pop(name, None)
        self.routed.pop(name, None)
        self.says(D0, AbortRequests((RequestId(name),)))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_history_leaves_every_request_with_one_owner_and_one_end(data: st.DataObject) -> None:
    draw = data.draw
    mesh = Mesh()
    names: list[str] = []
    gone: set[str] = set()
    for _ in range(draw(st.integers(1, 40))):
        action = draw(
            st.sampled_from(
                ["admit", "admit", "admit", "start", "kill", "finish", "report", "abort", "tick", "rejoin"]
                + ["begin", "give back", "scale"]
            )
        )
        identity = draw(st.sampled_from([S0, S1, S2]))
        if action == "admit":
            names.append(f"r{len(names)}")
            mesh.submit(names[-1], 0, draw(st.sampled_from([-1, -1, -1, 0, 1])))
        elif action == "start":
            mesh.start(identity)
        elif action == "kill":
            mesh.kill(identity)
        elif action == "abort" and names:
            gone.add(draw(st.sampled_from(names)))
            for name in sorted(gone):
                mesh.abort(name)
        elif action == "tick":
            mesh.tick(draw(st.sampled_from([1.0, HOLD_S / 2])))
        elif action == "rejoin":
            mesh.join(D0)
        elif action == "give back":
            mesh.give_back()
        elif action == "scale":
            mesh.says(SUPERVISOR, control.SetRanks(draw(st.integers(1, 3))))
        elif identity in mesh.schedulers:
            if action == "finish":
                mesh.finish(identity)
            elif action == "report":
                mesh.report(identity, draw(st.booleans()))
            elif action == "begin":
                mesh.begin(identity)
    mesh.says(SUPERVISOR, control.SetRanks(3))
    for identity in (S0, S1, S2):
        mesh.start(identity)
        mesh.report(identity)
    mesh.give_back()
    mesh.tick(RESUME_HOLD_S)  # the end of what waits for a rank of its own
    assert not mesh.core.held
    for identity, fake in mesh.schedulers.items():
        assert set(mesh.core.ranks[identity].requests) == set(fake.requests)
        while fake.requests:
            mesh.finish(identity)
        mesh.report(identity)
        assert mesh.core.ranks[identity].score == 0
    assert not mesh.core.owner
    assert not mesh.open
    assert mesh.finished | mesh.refused | gone >= set(names)
    assert not mesh.finished & mesh.refused
