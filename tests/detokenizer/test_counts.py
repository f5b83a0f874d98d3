"""What a detokenizer counts for /metrics, and the times that it adds to a request's first token."""

from array import array

from journal_bench import F0, S0, S1, Bench, admitted

from meshlm.detokenizer.events import Encode, Encoded
from meshlm.protocol.edges.admit import Readmit, Routed
from meshlm.protocol.edges.text import RequestEvent, Submit, TextDeltas, TextParams, TokenPrompt
from meshlm.protocol.edges.token import Ended, First, TokenDeltas
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, FinishReason, Handle, Incarnation, RequestId


def test_the_times_of_a_request_are_observed_and_go_with_its_first_token() -> None:
    bench = Bench()
    submit = Submit((Handle(1),), (RequestId("r"),), TokenPrompt(pack_i32([1])), SamplingParams(), TextParams(), 50)
    (encode,) = bench.says(F0, submit)
    assert isinstance(encode, Encode)
    bench.now += 0.5
    _, admit = bench.event(Encoded(encode.job, array("i", [1])))
    bench.now += 0.25
    first = admitted([admit])
    bench.routed(first, S0)
    bench.tokens(first, 0, "x")
    (batch,) = [send.message for send in bench.core.journal.batches()]
    assert isinstance(batch, TextDeltas)
    assert (batch.first[0].encode_us, batch.first[0].route_us) == (500_000, 250_000)
    histograms = bench.core.counts.told().histograms
    assert histograms["request_encode_time_seconds"].total == 0.5
    assert histograms["request_route_time_seconds"].total == 0.25


def test_retries_are_counted_by_reason() -> None:
    bench = Bench()
    bench.routed(admitted(bench.submit("a")), S0)
    again = admitted(bench.lost(S0))
    bench.says(COORDINATOR, Routed(again.work.handle, S1, Incarnation(1)))
    bench.says(COORDINATOR, Readmit((again.work.handle,)))
    bench.lost(COORDINATOR)
    bench.up(COORDINATOR, 2)
    retries = bench.core.counts.told().counters["request_retries"]
    assert retries == {"scheduler_lost": 1, "given_back": 1, "coordinator_lost": 1}


def test_text_says_when_it_left() -> None:
    """After the step's own times, so that the frontend knows how long the way to the client took."""
    bench = Bench()
    first = admitted(bench.submit("a"))
    bench.routed(first, S0)
    bench.tokens(first, 0, "x")
    for batch in bench.core.journal.open_batches.values():
        batch.timings = (7, 1, 2, 3, 4, 5, 0, 0)
    (send,) = bench.core.journal.batches(99)
    assert isinstance(send.message, TextDeltas)
    assert send.message.timings_ns == (7, 1, 2, 3, 4, 5, 0, 0, 99)


def test_an_end_tells_of_the_drafts_of_each_step_once() -> None:
    """Also where a scheduler is lost behind the first of them, and rows come twice."""
    bench = Bench()
    first = admitted(bench.submit("a"))
    bench.routed(first, S0)
    handle, one = pack_i32([first.work.handle]), pack_i32([1])
    bench.says(S0, TokenDeltas(handle, pack_i32([0]), one, one, first={0: First(0)}, drafts={0: bytes((3, 0))}))
    again = admitted(bench.lost(S0))
    bench.routed(again, S1)
    handle = pack_i32([again.work.handle])
    bench.says(S1, TokenDeltas(handle, pack_i32([0]), one, one, drafts={0: bytes((9, 9))}))
    rows = TokenDeltas(
        pack_i32([again.work.handle] * 2), pack_i32([1, 2]), b"", pack_i32([1, 1]), drafts={0: bytes((2, 1))}
    )
    bench.says(S1, rows)
    bench.says(
        S1, TokenDeltas(handle, pack_i32([3]), one, one, [Ended(0, FinishReason.LENGTH)], drafts={0: bytes((2, 0))})
    )
    (batch,) = [send.message for send in bench.core.journal.batches()]
    assert isinstance(batch, TextDeltas)
    assert [finished.drafts for finished in batch.finished] == [bytes((3, 0, 2, 1, 2, 0))]


def test_an_end_tells_what_happened_on_the_way() -> None:
    bench = Bench()
    bench.routed(admitted(bench.submit("a")), S0)
    again = admitted(bench.lost(S0))
    bench.routed(again, S1)
    bench.now += 2
    ended = [Ended(0, FinishReason.LENGTH, preempted_us=(1_500_000,))]
    handle, one = pack_i32([again.work.handle]), pack_i32([1])
    bench.says(S1, TokenDeltas(handle, pack_i32([0]), one, one, ended, first={0: First(0)}))
    (batch,) = [send.message for send in bench.core.journal.batches()]
    assert isinstance(batch, TextDeltas)
    (finished,) = batch.finished
    assert finished.events == (
        RequestEvent(1_500_000, "preemption"),
        RequestEvent(2_000_000, "retry", "scheduler_lost"),
    )
