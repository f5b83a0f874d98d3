"""Requests that no rank can take now: held, released in order, or refused in words."""

import msgspec
import pytest
from coordinator_bench import D0, S0, S1, WALL_S, Bench, admit, assigned, load, only

from meshlm.protocol.edges.admit import AbortRequests, Assign, Refused
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import ErrorKind, Handle, Identity, RequestId
from meshlm.runtime.process.deaths import BEGUN_S, NEW_S
from meshlm.runtime.process.events import Send


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
    assert only(bench.tick(NEW_S - 1.5), Refused) == []
    (send,) = only(bench.tick(0.5), Refused)
    assert send.to == D0
    assert send.message == Refused(Handle(1), ErrorKind.OVERLOADED, "no scheduler was ready within 60 s")
    (send,) = only(bench.tick(1.0), Refused)
    assert isinstance(send.message, Refused)
    assert send.message.handle == 2
    assert only(bench.tick(NEW_S), Refused) == []


def test_a_stream_that_ran_already_waits_longer_for_a_rank() -> None:
    bench = Bench(D0)
    bench.says(D0, admit("a", attempt=1))
    assert only(bench.tick(BEGUN_S - 1.0), Refused) == []
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
    (send,) = only(bench.tick(NEW_S), Refused)
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
    again = [bench.says(D0, admit(name, attempt=1, output_token_ids=pack_i32([1]))) for name in names]
    assert [only(sends, Refused) for sends in again] == [[], [], [], []]


def test_what_was_let_in_before_is_not_refused_because_the_queue_is_full() -> None:
    bench = Bench(D0, S0, max_waiting=2)
    bench.says(S0, load(num_waiting=2))
    (send,) = bench.says(D0, admit("new"))
    assert isinstance(send.message, Refused)
    assert assigned(bench, admit("another attempt", attempt=1)) == S0
    assert assigned(bench, admit("a resume of its client", output_token_ids=pack_i32([1]))) == S0
    routed_before = msgspec.structs.replace(admit("routed before", dp_rank=0), again=True)
    assert assigned(bench, routed_before) == S0


def test_held_requests_go_though_the_schedulers_queues_are_full() -> None:
    bench = Bench(D0, max_waiting=3)
    for name in "abc":
        bench.says(D0, admit(name))
    bench.join(S0)
    assert len(only(bench.says(S0, load(num_waiting=3)), Assign)) == 3
