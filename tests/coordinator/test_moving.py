"""Waiting requests move between ranks: when one comes, is full, or is to be removed."""

import msgspec
from coordinator_bench import D0, F0, LIFE, S0, S1, Bench, admit, assigned, load, only, stats

from meshlm.protocol.edges import control
from meshlm.protocol.edges.admit import Assign, GiveBack, Readmit, Refused, Returned, Routed, Started
from meshlm.protocol.wire.ids import HEAD, Handle, RequestId
from meshlm.runtime.process.events import Send


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
    bench.says(HEAD, control.SetRanks(1))
    assert Send(S1, GiveBack((), everything=True)) in bench.says(S1, load(0, 1, serving=False))


def test_a_removed_rank_gets_nothing_new_and_gives_back_what_waits() -> None:
    bench = Bench(D0, S0, S1, num_ranks=2)
    assert assigned(bench, admit("running", dp_rank=1)) == S1
    assert assigned(bench, admit("waiting", dp_rank=1, handle=5)) == S1
    sends = bench.says(HEAD, control.SetRanks(1))
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
    bench.says(HEAD, control.SetRanks(1))
    bench.says(HEAD, control.SetRanks(2))
    assert [assigned(bench, admit(str(number))) for number in range(2)] == [S0, S1]


def test_ranks_may_be_numbered_from_another_mesh_on() -> None:
    bench = Bench(F0, D0, S0, S1, num_ranks=2, first_rank=4)
    assert assigned(bench, admit("a", dp_rank=5)) == S1
    (refused,) = bench.says(D0, admit("b", dp_rank=1))
    assert isinstance(refused.message, Refused)
    assert "ranks 4 to 5" in refused.message.message
    assert assigned(bench, msgspec.structs.replace(admit("c", dp_rank=1), again=True)) == S1, "a scheduler's own number"
    (said,) = stats(bench.tick())
    assert [rank.dp_rank for rank in said.ranks] == [4, 5]
