"""No message to a frontend is too long for a frame: what is told again comes in pieces, and what cannot be sent ends alone."""

from itertools import pairwise

import pytest
from journal_bench import token_ids
from keyed_bench import ANSWER, F0, F1, LIFE, WINDOW_S, Bench

from meshlm.detokenizer import admission, journal
from meshlm.detokenizer.admission import checked_sampling
from meshlm.protocol.edges import text as text_edge
from meshlm.protocol.edges.admit import Admit
from meshlm.protocol.edges.text import (
    Abort,
    Accepted,
    Delivered,
    Detokenize,
    DetokenizeReply,
    Rejected,
    Retry,
    Submit,
    TextDeltas,
    Tokenize,
    TokenizeReply,
    TokenPrompt,
)
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import COORDINATOR, ErrorKind, Handle, RequestId
from meshlm.runtime.errors import RequestError
from meshlm.runtime.process.events import PeerLost, Received, Send


@pytest.mark.parametrize("finished", [True, False])
def test_what_is_told_again_comes_in_pieces(finished: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with a key that came back after 128,000 tokens with 20 log-probabilities each got them in one frame, or rather never."""
    bench = Bench()
    first = bench.ask(logprobs=0)
    end = len(ANSWER) if finished else 14
    bench.generate(bench.works[0], 0, end, logprobs=True, of_prompt=True)
    monkeypatch.setattr(text_edge, "PIECE_ENTRIES", 4)
    monkeypatch.setattr(journal, "MAX_BATCH_BYTES", 100)
    sent: list[TextDeltas] = []
    batches = bench.core.journal.batches

    def noted() -> list[Send]:
        sends = batches()
        sent.extend(send.message for send in sends if isinstance(send.message, TextDeltas))
        return sends

    monkeypatch.setattr(bench.core.journal, "batches", noted)
    second = bench.ask(F1, cut=6, logprobs=0)
    assert (second.text, second.logprobs, second.num_of_prompt) == (first.text, first.logprobs, 2)
    assert [start for start, _ in second.rows] == [0, 4, 6, 10, 14][: 5 if finished else 4]
    assert len(sent) > 2
    assert max(len(message.logprobs) for message in sent) < 3
    bench.generate(bench.works[0], 14, len(ANSWER), logprobs=True) if not finished else None
    assert second.text == ANSWER
    assert second.end is not None


@pytest.mark.parametrize("finished", [True, False])
def test_others_tokens_come_between_the_pieces(finished: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that came back after 100,000 tokens had all of them at once: everybody else waited for seconds."""
    monkeypatch.setattr(text_edge, "PIECE_ENTRIES", 2)
    bench = Bench()
    first = bench.ask(logprobs=0)
    other = bench.ask(F1, name="other")
    long, short = bench.works
    bench.generate(long, 0, 12, logprobs=True)
    bench.leave(first)
    bench.all_turns = False
    second = bench.ask(F1, logprobs=0)
    told = [second.num_tokens]
    while bench.core.journal.tells_again:
        if len(told) == 2:
            bench.generate(short, 0, 1)
            assert other.text == ANSWER[0]
            bench.generate(
                long, 12, len(ANSWER) if finished else 14, logprobs=True
            )  # too early for a client that has four
        else:
            bench.flush()
        told.append(second.num_tokens)
    assert told[:2] == [2, 4]
    assert sorted(set(told)) == sorted(told), "a turn told nothing"
    assert max(end - begin for begin, end in pairwise(told)) <= 4
    if not finished:
        bench.generate(long, 14, len(ANSWER), logprobs=True)
    assert (second.text, len(second.logprobs)) == (ANSWER, len(ANSWER))
    assert second.end is not None


def test_a_connection_that_goes_is_told_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It left, a newer one came, its frontend died, or the request was aborted."""
    monkeypatch.setattr(text_edge, "PIECE_ENTRIES", 2)
    bench = Bench()
    bench.leave(bench.ask())
    bench.generate(bench.works[0], 0, 12)
    bench.all_turns = False
    bench.leave(bench.ask(F1))
    assert not bench.core.journal.tells_again
    older, newer = bench.ask(F0), bench.ask(F1)
    assert len(bench.core.journal._replays) == 1
    bench.event(PeerLost(F1, LIFE))
    assert not bench.core.journal.tells_again
    assert bench.ask(F0).num_tokens == 2
    bench.event(Received(F0, LIFE, Abort((RequestId("r"),))))
    assert not bench.core.journal.tells_again
    assert (older.num_tokens, newer.num_tokens) == (2, 2)


def test_one_that_must_make_room_is_told_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished request is forgotten for a newer one while its client, who came back, is told it."""
    monkeypatch.setattr(text_edge, "PIECE_ENTRIES", 2)
    bench = Bench()
    bench.ask()
    bench.generate(bench.works[0], 0, len(ANSWER))
    bench.all_turns = False
    again = bench.ask(F1)
    bench.tick(WINDOW_S + 1)
    assert RequestId("r") not in bench.core.journal.by_id
    while bench.core.journal.tells_again:
        bench.flush()
    assert again.text == ANSWER
    assert again.end is not None


def test_logprobs_that_were_lost_on_their_way_are_not_left_out_in_silence() -> None:
    bench = Bench()
    first = bench.ask(F0, logprobs=0)
    bench.generate(bench.works[0], 0, 5, logprobs=True)
    other = Bench()
    again = Submit(
        (Handle(1),),
        (RequestId("r"),),
        TokenPrompt(pack_i32([1, 2])),
        SamplingParams(logprobs=0),
        attempt=1,
        delivered=pack_i32(token_ids(ANSWER[:5])),
        num_logprobs=5,
        retry=Retry("r", b"b", (0,)),
    )
    other.event(Received(F0, LIFE, Delivered(RequestId("r"), tuple(first.logprobs[:4]))))
    (send,) = other.core.handle(Received(F0, LIFE, again), 0.0)
    assert isinstance(send, Send)
    assert isinstance(send.message, Rejected)
    assert send.message.kind is ErrorKind.INTERNAL
    assert not other.core._delivered


def test_prompt_logprobs_have_a_limit() -> None:
    def asked(num_prompt: int, k: int, n: int) -> SamplingParams:
        handles = tuple(Handle(number) for number in range(1, n + 1))
        submit = Submit(handles, (), TokenPrompt(b""), SamplingParams(prompt_logprobs=k), max_tokens=1)
        return checked_sampling(submit, 0, num_prompt, 1 << 22)

    asked(admission.MAX_PROMPT_LOGPROBS // 21, 20, 1)
    asked(1 << 20, -1, 4)
    for num_prompt, k, n in ((138_000, 20, 1), (25_000, 20, 2), ((1 << 20) + 1, 0, 1)):
        with pytest.raises(RequestError, match=f"at most {admission.MAX_PROMPT_LOGPROBS}") as refused:
            asked(num_prompt, k, n)
        assert (refused.value.kind, refused.value.param) == (ErrorKind.INVALID, "prompt_logprobs")


def test_an_answer_that_no_frame_holds_is_an_error() -> None:
    bench = Bench()
    core, text = bench.core, "too long"
    for ask, reply in (
        (Tokenize(Handle(5), TokenPrompt(b"")), TokenizeReply(Handle(5), error=text, param="prompt")),
        (Detokenize(Handle(5), b""), DetokenizeReply(Handle(5), error=text, param="tokens")),
    ):
        assert core.too_long(F0, type(reply)(ask.handle), text) == [Send(F0, reply)]


@pytest.mark.parametrize("what", ["rows", "accepted", "admit"])
def test_what_cannot_be_sent_ends_its_request_alone(what: str) -> None:
    bench = Bench()
    gone, other = bench.ask(name="a"), bench.ask(name="b")
    work, beside = bench.works
    handles = (Handle(gone.handle),)
    if what == "admit":
        effects = bench.core.too_long(COORDINATOR, Admit(work), "too long")
    elif what == "accepted":
        effects = bench.core.too_long(F0, Accepted(handles, 2), "too long")
    else:
        effects = bench.core.too_long(F0, TextDeltas(pack_i32(handles), b"", b"", b"", [""]), "too long")
    for effect in effects:
        bench._perform(effect)
    assert gone.refused is not None
    assert (gone.refused.kind, gone.refused.message) == (ErrorKind.INTERNAL, "too long")
    assert what == "admit" or bench.aborted == {work.request_id}
    bench.core.check()
    bench.generate(beside, 0, len(ANSWER))
    assert other.end is not None
    assert not bench.core.journal.by_handle
