"""What is said besides tokens: aborts, handles of nobody, refusals; and streams that a frontend attaches to again."""

from array import array

import msgspec
import pytest
from journal_bench import F0, F1, S0, Bench, admits, admitted

from meshlm.detokenizer.aborts import STRANGER_ROWS
from meshlm.detokenizer.admission import checked_sampling
from meshlm.detokenizer.events import Encode, Encoded
from meshlm.protocol.edges.admit import AbortRequests, Refused
from meshlm.protocol.edges.text import Abort, Accepted, Attach, Rejected, Submit, TextDeltas, TextParams, TokenPrompt
from meshlm.protocol.edges.token import Disown
from meshlm.protocol.sampling import RepetitionDetection, SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, ErrorKind, FinishReason, Handle, RequestId
from meshlm.runtime.errors import RequestError
from meshlm.runtime.process.events import Send

# --- refusals and aborts ---


def test_an_abort_is_said_again_to_the_next_coordinator() -> None:
    bench = Bench()
    bench.routed(admitted(bench.submit("a")), S0)
    bench.routed(admitted(bench.submit("bb")), S0)
    gone = AbortRequests((RequestId("a"),))
    assert bench.abort("a") == [Send(COORDINATOR, gone)]
    bench.lost(COORDINATOR)
    assert bench.abort("bb") == []
    both = AbortRequests((RequestId("a"), RequestId("bb")))
    assert bench.up(COORDINATOR, 2) == [Send(COORDINATOR, both)]


def test_an_id_that_is_open_again_is_not_aborted_again() -> None:
    bench = Bench()
    bench.routed(admitted(bench.submit("a")), S0)
    bench.lost(COORDINATOR)
    bench.abort("a")
    bench.submit("a")
    assert admitted(bench.up(COORDINATOR, 2)).work.request_id == "a"


def test_tokens_that_keep_coming_for_nobody_are_disowned() -> None:
    bench = Bench()
    first = admitted(bench.submit("a"))
    bench.routed(first, S0)
    bench.tokens(first, 0, "x")
    bench.abort("a")
    told = [bench.tokens(first, number, "x") for number in range(1, 2 * STRANGER_ROWS + 1)]
    nobody = [Send(S0, Disown(pack_i32([first.work.handle])))]
    quiet: list[object] = [[]] * (STRANGER_ROWS - 1)
    assert told == [*quiet, nobody, *quiet, nobody]


def test_an_end_by_repetition_is_known_however_its_scheduler_dies() -> None:
    """Said by the scheduler, or seen in the tokens where that died before it could say so."""
    for told in (True, False):
        bench = Bench()
        wanted = SamplingParams(repetition_detection=RepetitionDetection(2, 1, 3))
        submit = Submit((Handle(1),), (RequestId("r"),), TokenPrompt(pack_i32([1])), wanted, TextParams(), 50)
        (encode,) = bench.says(F0, submit)
        assert isinstance(encode, Encode)
        _, admit = bench.event(Encoded(encode.job, array("i", [1])))
        first = admitted([admit])
        bench.routed(first, S0)
        bench.tokens(first, 0, "abcbcbc", end=FinishReason.REPETITION if told else None)
        assert bench.lost(S0) == []
        (batch,) = [send.message for send in bench.core.journal.batches()]
        assert isinstance(batch, TextDeltas)
        ends = [(end.reason, end.stop_reason, end.num_output_tokens) for end in batch.finished]
        assert ends == [(FinishReason.REPETITION, "repetition_detected", 7)]
        assert "".join(batch.texts) == "abcbcbc"


def test_bad_words_go_to_the_workers_as_tokens() -> None:
    bench = Bench()
    submit = Submit(
        (Handle(1),),
        (RequestId("r"),),
        TokenPrompt(pack_i32([1])),
        SamplingParams(),
        TextParams(bad_words=("a", "b")),
        9,
    )
    (encode,) = bench.says(F0, submit)
    assert isinstance(encode, Encode)
    assert encode.bad_words == ("a", "b")
    _, admit = bench.event(Encoded(encode.job, array("i", [1]), bad_words=((0,), (1,))))
    assert admitted([admit]).work.sampling.bad_words_token_ids == ((0,), (1,))


def test_a_refusal_names_the_field() -> None:
    bench = Bench()
    first = admitted(bench.submit())
    refused = Refused(first.work.handle, ErrorKind.INVALID, "no such rank", "X-data-parallel-rank")
    (send,) = bench.says(COORDINATOR, refused)
    assert send == Send(F0, Rejected((Handle(1),), ErrorKind.INVALID, "no such rank", "X-data-parallel-rank"))
    assert not bench.core.journal.by_id


def test_an_abort_reaches_the_coordinator() -> None:
    bench = Bench()
    bench.submit("a")
    bench.submit("bb")
    assert bench.says(F0, Abort((RequestId("a"), RequestId("unknown")))) == [
        Send(COORDINATOR, AbortRequests((RequestId("a"),)))
    ]
    assert bench.lost(F0) == [Send(COORDINATOR, AbortRequests((RequestId("bb"),)))]


# --- another frontend reads on ---


def attach(bench: Bench, from_index: int) -> None:
    bench.says(F1, Attach(Handle(7), RequestId("r"), from_index))


def test_attach_gives_the_text_from_there_on() -> None:
    bench = Bench()
    first = admitted(bench.submit())
    bench.tokens(first, 0, "hello")
    bench.news()
    attach(bench, 2)
    assert bench.news() == [(F1, 7, 2, "llo", None)]
    bench.tokens(first, 5, "w", end=FinishReason.LENGTH)
    assert bench.news() == [(F1, 7, 5, "w", FinishReason.LENGTH)]


@pytest.mark.parametrize("from_index", range(6))
@pytest.mark.parametrize("rest", ["fgh", "xyz", "fxe"])
def test_attach_does_not_tell_what_is_held_back(from_index: int, rest: str) -> None:
    """'de' may be the beginning of 'defg': it comes with the token that decides, and once."""
    bench = Bench()
    first = admitted(bench.submit(stop=("defgh",)))
    bench.tokens(first, 0, "abcde")
    ((*_, before, _),) = bench.news()
    assert before == "abc"
    attach(bench, from_index)
    ((*_, start, again, _),) = bench.news()
    assert (start, before[:from_index] + again) == (from_index, "abc")
    bench.tokens(first, 5, rest, end=FinishReason.LENGTH)
    ((*_, after, reason),) = bench.news()
    expected = ("abc", FinishReason.STOP) if rest == "fgh" else ("abcde" + rest, FinishReason.LENGTH)
    assert (before + after, reason) == expected


def test_attach_counts_min_tokens_as_the_first_reading_did() -> None:
    bench = Bench()
    submit = Submit(
        (Handle(1),),
        (RequestId("r"),),
        TokenPrompt(pack_i32([1])),
        SamplingParams(min_tokens=3),
        TextParams(stop=("b",)),
        9,
    )
    (encode,) = bench.says(F0, submit)
    assert isinstance(encode, Encode)
    _, *effects = bench.event(Encoded(encode.job, array("i", [1])))
    bench.tokens(admitted(effects), 0, "abc")
    attach(bench, 0)
    assert [row[3] for row in bench.news()] == ["abc", "abc"]


def test_attach_to_what_is_not_known() -> None:
    bench = Bench()
    (send,) = bench.says(F1, Attach(Handle(7), RequestId("r")))
    assert isinstance(send, Send)
    assert isinstance(send.message, Rejected)
    assert send.message.kind is ErrorKind.NOT_FOUND


def test_what_passes_the_context_is_refused_or_ends_there() -> None:
    """A client of HTTP is told; `LLM.generate` ends the output where the context does, as vLLM's."""
    submit = Submit((Handle(1),), (RequestId("a"),), TokenPrompt(b""), SamplingParams(min_tokens=9), max_tokens=50)
    with pytest.raises(RequestError, match="max_tokens may be 7 at most"):
        checked_sampling(submit, 0, 93, 100)
    capped = msgspec.structs.replace(submit, cap_max_tokens=True)
    found = checked_sampling(capped, 0, 93, 100)
    assert (found.max_tokens, found.min_tokens) == (7, 7)
    found = checked_sampling(capped, 0, 10, 100)
    assert (found.max_tokens, found.min_tokens) == (50, 9)
    with pytest.raises(RequestError, match="min_tokens 9 exceeds max_tokens 5"):
        checked_sampling(msgspec.structs.replace(capped, max_tokens=5), 0, 10, 100)


def test_the_choices_of_a_prompt_are_admitted_a_few_at_once() -> None:
    """A hundred of a long prompt were 90 ms in which no other request got a token."""
    bench = Bench()
    names = tuple(RequestId(f"r{choice}") for choice in range(40))
    handles = tuple(Handle(100 + choice) for choice in range(40))
    submit = Submit(handles, names, TokenPrompt(pack_i32([1])), SamplingParams(seed=5), max_tokens=9)
    (encode,) = bench.says(F0, submit)
    assert isinstance(encode, Encode)
    encoded = Encoded(encode.job, array("i", [1]))
    told: list[int] = []
    seeds: list[int] = []
    sizes: list[int] = []
    while encode.job in bench.core.jobs:
        accepted, *effects = bench.event(encoded)
        assert isinstance(accepted, Send)
        assert isinstance(accepted.message, Accepted)
        told += accepted.message.handles
        found = admits(effects)
        sizes.append(len(found))
        seeds += [admit.work.sampling.seed for admit in found]
        if len(sizes) == 1:
            assert bench.abort("r39") == []
            assert bench.abort("r0") != [], "that one is the coordinator's already"
    assert sizes == [16, 16, 7]
    assert told == list(handles[:39])
    assert seeds == [5 + choice for choice in range(39)]
