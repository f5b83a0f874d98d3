"""The desk against detokenizers that die, repeat themselves, skip ahead and speak too late."""

from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.frontend.choice import Choice
from meshlm.frontend.desk import MAX_ATTEMPTS, Desk, Send
from meshlm.protocol.columns import ints, pack_i32
from meshlm.protocol.ids import ErrorKind, FinishReason, Handle, Identity, RequestId, Role
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.text_edge import (
    Abort,
    Accepted,
    Attach,
    Finished,
    PositionLogprobs,
    Rejected,
    Submit,
    TextDeltas,
    TextPrompt,
    TokenLogprob,
)
from meshlm.protocol.token_edge import First

D0, D1, D2 = (Identity(Role.DETOKENIZER, index) for index in range(3))


def truth(request_id: str, index: int) -> int:
    """Output token `index` of a request, whoever computes it."""
    return sum(map(ord, request_id)) * 31 + index


def word(token: int) -> str:
    return f" {token}"


class Client:
    """An Exchange that writes down what it is told, and accepts nothing after an end."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []
        self.tokens: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.ends: dict[int, FinishReason] = {}
        self.errors: dict[int, tuple[ErrorKind, str, str]] = {}
        self.num_accepted = 0
        self.rows: list[tuple[object, ...]] = []
        self.closed = False

    def accepted(self, choice: Choice, accepted: Accepted) -> None:
        assert not self.closed
        self.num_accepted += 1

    def row(
        self,
        choice: Choice,
        token_ids: memoryview,
        text: str,
        finished: Finished | None,
        logprobs: list[PositionLogprobs] | None,
        prompt_logprobs: list[PositionLogprobs | None] | None,
        first: First | None,
    ) -> None:
        self.text(choice, token_ids, text)
        self.rows.append((choice.index, finished, logprobs, prompt_logprobs, first))
        if finished is not None:
            self.ends[choice.index] = finished.reason

    def text(self, choice: Choice, token_ids: memoryview, text: str) -> None:
        assert not self.closed, "news for a client that left"
        assert choice.index not in self.ends, "news after the end"
        self.tokens.setdefault(choice.index, []).extend(token_ids.tolist())
        self.texts[choice.index] = self.texts.get(choice.index, "") + text

    def plain(self, choice: Choice) -> None:
        """Its rows are looked at one by one."""

    def failed(self, choice: Choice, kind: ErrorKind, message: str, param: str) -> None:
        assert not self.closed, "news for a client that left"
        assert choice.index not in self.ends, "two ends"
        self.ends[choice.index] = FinishReason.ERROR
        self.errors[choice.index] = (kind, message, param)


def opened(desk: Desk, name: str = "r", n: int = 1) -> tuple[Client, list[Send]]:
    """A client with one prompt and n choices, as server.build_submits makes them."""
    client = Client()
    handles = tuple(desk.new_handle() for _ in range(n))
    names = tuple(RequestId(f"{name}-{index}") for index in range(n))
    submit = Submit(handles, names, TextPrompt("hi"), SamplingParams(seed=7))
    for index, (handle, request_id) in enumerate(zip(handles, names, strict=True)):
        own = msgspec.structs.replace(
            submit, handles=(handle,), request_ids=(request_id,), sampling=SamplingParams(seed=7 + index)
        )
        client.choices.append(Choice(client, index, 0, own, handle))
    sends = desk.open(client.choices, submit)
    desk.check()
    return client, sends


def deltas(*rows: tuple[Choice | int, int, list[int]], **more: object) -> TextDeltas:
    """Rows of (choice or handle, start, tokens)."""
    handles = [row[0].handle if isinstance(row[0], Choice) else row[0] for row in rows]
    found = TextDeltas(
        pack_i32(handles),
        pack_i32([start for _, start, _ in rows]),
        pack_i32([len(tokens) for _, _, tokens in rows]),
        pack_i32([token for _, _, tokens in rows for token in tokens]),
        ["".join(map(word, tokens)) for _, _, tokens in rows],
    )
    return msgspec.structs.replace(found, **more)


def a_desk(*detokenizers: Identity) -> Desk:
    desk = Desk()
    for identity in detokenizers or (D0,):
        assert desk.detokenizer_up(identity) == []
    return desk


# --- opening ---


def test_one_submit_for_all_choices_of_a_prompt() -> None:
    desk = a_desk()
    client, (send,) = opened(desk, n=3)
    assert send.to == D0
    assert isinstance(send.message, Submit)
    assert send.message.handles == tuple(choice.handle for choice in client.choices) == (1, 2, 3)
    assert desk.load == {D0: 3}


def test_the_detokenizer_with_the_fewest_open_choices_is_asked() -> None:
    desk = a_desk(D1, D0)
    asked = [opened(desk, f"r{n}", n)[1][0].to for n in (2, 1, 1, 1)]
    assert asked == [D0, D1, D1, D0]
    assert desk.load == {D0: 3, D1: 2}


def test_handles_are_positive_int32() -> None:
    desk = Desk()
    desk._next_handle = 0x7FFF_FFFE
    assert [desk.new_handle(), desk.new_handle()] == [0x7FFF_FFFF, 1]


# --- tokens ---


def test_plain_rows_come_once_and_in_order() -> None:
    desk = a_desk()
    one, _ = opened(desk, "a")
    two, _ = opened(desk, "b")
    (a,), (b,) = one.choices, two.choices
    assert desk.deltas(deltas((a, 0, [1]), (b, 0, [5, 6])), D0, 1.0) == []
    assert desk.deltas(deltas((b, 2, [7]), (a, 1, [2, 3])), D0, 2.0) == []
    assert (one.tokens, two.tokens) == ({0: [1, 2, 3]}, {0: [5, 6, 7]})
    assert (one.texts, two.texts) == ({0: " 1 2 3"}, {0: " 5 6 7"})
    assert one.choices[0].token_ids == array("i", [1, 2, 3])
    assert one.rows == []
    desk.check()


def test_no_counts_means_one_token_each() -> None:
    desk = a_desk()
    client, _ = opened(desk, n=2)
    both = deltas(*((choice, 0, [9 + choice.index]) for choice in client.choices), counts=b"")
    desk.deltas(both, D0, 1.0)
    assert client.tokens == {0: [9], 1: [10]}


def test_a_row_brings_what_belongs_to_it() -> None:
    desk = a_desk()
    client, _ = opened(desk, n=2)
    at = [PositionLogprobs(TokenLogprob(1, -0.5, 1, " 1", b" 1"))]
    end = Finished(1, FinishReason.STOP, "x", 1)
    batch = deltas(
        *((choice, 0, [1]) for choice in client.choices),
        finished=[end],
        logprobs={0: at},
        prompt_logprobs={1: [None, *at]},
        first={0: First(16, 20, 30)},
    )
    assert desk.deltas(batch, D0, 1.0) == []
    assert client.rows == [(0, None, at, None, First(16, 20, 30)), (1, end, None, [None, *at], None)]
    assert client.choices[1].finished == end
    assert desk.load == {D0: 1}
    desk.check()


def test_duplicates_are_dropped() -> None:
    desk = a_desk()
    client, _ = opened(desk)
    (choice,) = client.choices
    batch = deltas((choice, 0, [1, 2]))
    assert [desk.deltas(batch, D0, 1.0), desk.deltas(batch, D0, 2.0), desk.deltas(batch, D0, 3.0)] == [[], [], []]
    assert desk.deltas(deltas((choice, 1, [2])), D0, 4.0) == []
    assert client.tokens == {0: [1, 2]}
    assert client.texts == {0: " 1 2"}
    desk.deltas(deltas((choice, 2, [3])), D0, 5.0)
    assert client.tokens == {0: [1, 2, 3]}


def test_a_gap_is_asked_for_again_and_loses_nothing() -> None:
    desk = a_desk()
    client, _ = opened(desk, "a")
    other, _ = opened(desk, "b")
    (choice,) = client.choices
    desk.deltas(deltas((choice, 0, [1, 2])), D0, 1.0)
    sends = desk.deltas(deltas((choice, 3, [4]), (other.choices[0], 0, [8])), D0, 2.0)
    assert sends == [Send(D0, Attach(choice.handle, RequestId("a-0"), 2))]
    assert (client.tokens, other.tokens) == ({0: [1, 2]}, {0: [8]})
    desk.deltas(deltas((choice, 2, [3, 4, 5])), D0, 3.0)
    assert client.tokens == {0: [1, 2, 3, 4, 5]}


def test_an_end_behind_a_gap_is_none_yet() -> None:
    desk = a_desk()
    client, _ = opened(desk)
    (choice,) = client.choices
    end = Finished(0, FinishReason.LENGTH)
    (send,) = desk.deltas(deltas((choice, 1, [2]), finished=[end]), D0, 1.0)
    assert send.message == Attach(choice.handle, RequestId("r-0"), 0)
    assert not client.ends
    desk.deltas(deltas((choice, 0, [1, 2]), finished=[end]), D0, 2.0)
    assert (client.tokens, client.ends) == ({0: [1, 2]}, {0: FinishReason.LENGTH})


def test_rows_of_unknown_handles_do_not_shift_the_others() -> None:
    desk = a_desk()
    client, _ = opened(desk)
    desk.deltas(deltas((77, 0, [1, 2, 3]), (client.choices[0], 0, [4]), (78, 9, [5])), D0, 1.0)
    assert client.tokens == {0: [4]}
    assert desk.num_tokens == 1


def test_columns_of_no_int32_are_an_error() -> None:
    with pytest.raises(ValueError, match="int32"):
        a_desk().deltas(TextDeltas(b"\0", b"", b"", b"", []), D0, 1.0)


def test_times_of_tokens() -> None:
    desk = a_desk()
    client, _ = opened(desk)
    (choice,) = client.choices
    for index, now in enumerate((10.0, 10.5, 11.0, 12.0)):
        desk.deltas(deltas((choice, index, [index])), D0, now)
    assert (choice.first_at, choice.last_at) == (10.0, 12.0)
    assert desk.intervals == {0.5: 2, 1.0: 1}
    assert desk.num_tokens == 4


def test_an_end_without_tokens_is_no_token() -> None:
    desk = a_desk()
    client, _ = opened(desk, n=2)
    none, one = client.choices
    desk.deltas(deltas((none, 0, []), finished=[Finished(0, FinishReason.ERROR)]), D0, 10.0)
    assert (none.first_at, none.last_at) == (0.0, 0.0)  # "0: none yet"
    desk.deltas(deltas((one, 0, [1])), D0, 11.0)
    desk.deltas(deltas((one, 1, []), finished=[Finished(0, FinishReason.STOP)]), D0, 15.0)
    assert (one.first_at, one.last_at) == (11.0, 11.0)
    assert desk.intervals == {}


# --- ends ---


def test_nothing_follows_an_end() -> None:
    desk = a_desk()
    client, _ = opened(desk)
    (choice,) = client.choices
    batch = deltas((choice, 0, [1]), finished=[Finished(0, FinishReason.STOP)])
    desk.deltas(batch, D0, 1.0)
    assert (desk.by_handle, desk.load) == ({}, {D0: 0})
    later = deltas((choice, 1, [2]), finished=[Finished(0, FinishReason.LENGTH)])
    assert desk.deltas(batch, D0, 2.0) == desk.deltas(later, D0, 2.0) == []
    desk.rejected(Rejected((choice.handle,), ErrorKind.INTERNAL, "late"))
    assert desk.detokenizer_down(D0) == desk.close(client.choices) == []
    assert (client.tokens, client.ends, client.errors) == ({0: [1]}, {0: FinishReason.STOP}, {})


def test_rejected_ends_each_choice_once() -> None:
    desk = a_desk()
    client, _ = opened(desk, n=2)
    message = Rejected(tuple(choice.handle for choice in client.choices), ErrorKind.INVALID, "too long", "prompt")
    desk.rejected(message)
    desk.rejected(message)
    assert client.errors == dict.fromkeys((0, 1), (ErrorKind.INVALID, "too long", "prompt"))
    assert desk.load == {D0: 0}
    assert [choice.finished.reason for choice in client.choices if choice.finished] == [FinishReason.ERROR] * 2
    desk.check()


def test_accepted_reaches_open_choices_only() -> None:
    desk = a_desk()
    client, _ = opened(desk, n=2)
    desk.accepted(Accepted((*(choice.handle for choice in client.choices), Handle(99)), 3))
    assert client.num_accepted == 2
    desk.close(client.choices)
    client.closed = True
    desk.accepted(Accepted(tuple(choice.handle for choice in client.choices), 3))


def test_close_aborts_what_still_runs() -> None:
    desk = a_desk(D0, D1)
    client, _ = opened(desk, "a", n=2)
    other, _ = opened(desk, "b")
    first, second = client.choices
    desk.deltas(deltas((first, 0, [1]), finished=[Finished(0, FinishReason.STOP)]), D0, 1.0)
    assert desk.close(client.choices) == [Send(D0, Abort((RequestId("a-1"),)))]
    client.closed = True
    desk.deltas(deltas((second, 0, [1])), D0, 2.0)
    desk.close(client.choices)
    assert desk.load == {D0: 0, D1: 1}
    assert list(desk.by_handle.values()) == other.choices
    desk.check()


def test_close_names_each_detokenizer_its_own() -> None:
    desk = a_desk(D0, D1)
    client, _ = opened(desk, n=3)
    desk.detokenizer_down(D0)
    assert desk.detokenizer_up(D0) == []
    assert desk.close(client.choices) == [Send(D1, Abort((RequestId("r-0"), RequestId("r-1"), RequestId("r-2"))))]


# --- detokenizers come and go ---


def test_a_dead_detokenizers_choices_go_on_elsewhere() -> None:
    desk = a_desk(D0, D1)
    client, _ = opened(desk, n=2)
    first, second = client.choices
    old = second.handle
    desk.deltas(deltas((second, 0, [1, 2])), D0, 1.0)
    sends = desk.detokenizer_down(D0)
    desk.check()
    assert [send.to for send in sends] == [D1, D1]
    submits = [send.message for send in sends]
    for choice, submit, delivered in zip((first, second), submits, ([], [1, 2]), strict=True):
        assert isinstance(submit, Submit)
        assert submit.handles == (choice.handle,)
        assert submit.request_ids == (f"r-{choice.index}",)
        assert submit.attempt == 1
        assert submit.sampling.seed == 7 + choice.index
        assert ints(submit.delivered) == delivered
    assert second.handle != old
    desk.deltas(deltas((old, 2, [99])), D0, 2.0)  # the dead one's last words
    desk.deltas(deltas((second, 2, [3])), D1, 3.0)
    assert client.tokens == {1: [1, 2, 3]}


def test_without_a_detokenizer_requests_wait() -> None:
    desk = Desk()
    client, sends = opened(desk, n=2)
    assert sends == []
    assert desk.orphans == client.choices
    sends = desk.detokenizer_up(D2)
    assert [(send.to, type(send.message)) for send in sends] == [(D2, Submit), (D2, Submit)]
    assert desk.orphans == []
    assert desk.load == {D2: 2}
    desk.check()
    assert desk.detokenizer_up(D2) == [], "said twice is heard once"
    assert desk.load == {D2: 2}


def test_orphans_expire_in_words() -> None:
    desk = Desk()
    client, _ = opened(desk)
    desk.expire_orphans("nobody came")
    desk.expire_orphans("nobody came")
    assert client.errors == {0: (ErrorKind.OVERLOADED, "nobody came", "")}
    assert desk.detokenizer_up(D0) == []


def test_a_client_that_leaves_takes_its_orphans_along() -> None:
    desk = Desk()
    client, _ = opened(desk, "a")
    other, _ = opened(desk, "b")
    assert desk.close(client.choices) == []
    assert desk.orphans == other.choices
    assert len(desk.detokenizer_up(D0)) == 1


def test_a_deadline_holds_whoever_is_stuck() -> None:
    desk = a_desk(D0)
    client, orphan, other = (opened(desk, name)[0] for name in ("a", "b", "c"))
    for late in (client, orphan):
        late.choices[0].submit = msgspec.structs.replace(late.choices[0].submit, deadline_s=100.0)
    assert desk.expire(100.5) == [], "its scheduler's to say"
    desk.detokenizer_down(D0)
    desk.detokenizer_up(D1)
    (abort,) = desk.expire(102.0)
    assert abort == Send(D1, Abort((RequestId("a-0"), RequestId("b-0"))))
    assert [late.errors[0][0] for late in (client, orphan)] == [ErrorKind.TIMEOUT] * 2
    assert not other.errors
    desk.check()
    desk.detokenizer_down(D1)
    waiting, _ = opened(desk, "d")
    waiting.choices[0].submit = msgspec.structs.replace(waiting.choices[0].submit, deadline_s=100.0)
    assert desk.expire(102.0) == []
    assert waiting.errors[0][0] is ErrorKind.TIMEOUT
    assert waiting.choices[0] not in desk.orphans


def test_a_request_that_kills_detokenizers_is_given_up() -> None:
    desk = a_desk(D0)
    client, _ = opened(desk)
    num_sent = 1
    for _ in range(MAX_ATTEMPTS + 2):
        num_sent += len(desk.detokenizer_down(D0)) + len(desk.detokenizer_up(D0))
        desk.check()
    assert num_sent == MAX_ATTEMPTS
    kind, text, _ = client.errors[0]
    assert kind is ErrorKind.INTERNAL
    assert f"died {MAX_ATTEMPTS} times" in text


def test_a_request_that_gets_tokens_survives_any_number_of_deaths() -> None:
    desk = a_desk(D0)
    client, _ = opened(desk)
    choice = client.choices[0]
    for number in range(3 * MAX_ATTEMPTS):
        desk.deltas(deltas((choice, number, [truth("r-0", number)])), D0, 0.0)
        desk.detokenizer_down(D0)
        (send,) = desk.detokenizer_up(D0)
        assert isinstance(send.message, Submit)
        assert (send.message.attempt, len(ints(send.message.delivered))) == (number + 1, number + 1)
    assert not client.errors


def test_waiting_is_no_attempt() -> None:
    desk = Desk()
    opened(desk)
    (send,) = desk.detokenizer_up(D0)
    assert isinstance(send.message, Submit)
    assert send.message.attempt == 0
    assert desk.detokenizer_down(D0) == []
    (send,) = desk.detokenizer_up(D1)
    assert isinstance(send.message, Submit)
    assert send.message.attempt == 1


# --- any history ---


class Mesh:
    """Detokenizers that know each request's true tokens, and a desk between them and its clients."""

    def __init__(self) -> None:
        self.desk = Desk()
        self.clients: list[Client] = []
        self.up: set[Identity] = set()
        self.streams: dict[Identity, dict[int, tuple[str, int]]] = {}  # handle -> request, tokens generated
        self.said: list[tuple[Identity, TextDeltas]] = []  # everything ever said, to be said again
        self.now = 0.0

    def take(self, sends: list[Send]) -> None:
        self.desk.check()
        for send in sends:
            assert send.to in self.up, "a message to nobody"
            streams = self.streams[send.to]
            match send.message:
                case Submit() as submit:
                    delivered = ints(submit.delivered)
                    for handle, name in zip(submit.handles, submit.request_ids, strict=True):
                        assert handle not in streams
                        assert delivered == [truth(name, index) for index in range(len(delivered))]
                        streams[handle] = (name, len(delivered))
                case Abort(request_ids=names):
                    self.streams[send.to] = {h: stream for h, stream in streams.items() if stream[0] not in names}
                case Attach() as attach:
                    if attach.handle in streams:
                        self.say(send.to, attach.handle, attach.from_index, streams[attach.handle][1])

    def say(self, sender: Identity, handle: int, start: int, stop: int, end: bool = False) -> None:
        name = self.streams[sender][handle][0]
        row = (handle, start, [truth(name, index) for index in range(start, stop)])
        finished = [Finished(0, FinishReason.LENGTH)] if end else []
        batch = deltas((78, 0, [0]), row) if not end else deltas(row, finished=finished)
        self.said.append((sender, batch))
        self.hear(sender, batch)

    def hear(self, sender: Identity, batch: TextDeltas) -> None:
        self.now += 1.0
        self.take(self.desk.deltas(batch, sender, self.now))

    def step(self, sender: Identity, handle: int, count: int, lost: bool) -> None:
        name, at = self.streams[sender][handle]
        self.streams[sender][handle] = (name, at + count)
        if not lost:
            self.say(sender, handle, at, at + count)

    def finish(self, sender: Identity, handle: int) -> None:
        at = self.streams[sender][handle][1]
        self.say(sender, handle, at, at)  # shows a gap, if there is one
        self.say(sender, handle, at, at, end=True)
        del self.streams[sender][handle]

    def rise(self, identity: Identity) -> None:
        if identity not in self.up:
            self.up.add(identity)
            self.streams[identity] = {}
            self.take(self.desk.detokenizer_up(identity))

    def fall(self, identity: Identity) -> None:
        if identity in self.up:
            self.up.remove(identity)
            del self.streams[identity]
            self.take(self.desk.detokenizer_down(identity))

    def open_streams(self) -> list[tuple[Identity, int]]:
        return [(identity, handle) for identity, streams in sorted(self.streams.items()) for handle in streams]


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_history_gives_each_client_its_tokens_once_and_one_end(data: st.DataObject) -> None:
    draw = data.draw
    mesh = Mesh()
    actions = ["open", "step", "step", "step", "lose", "again", "finish", "reject", "close", "rise", "fall", "expire"]
    mesh.rise(D0)
    for number in range(draw(st.integers(1, 40))):
        action = draw(st.sampled_from(actions))
        streams = mesh.open_streams()
        if action == "open":
            client, sends = opened(mesh.desk, f"r{number}", draw(st.integers(1, 3)))
            mesh.clients.append(client)
            mesh.take(sends)
        elif action in ("rise", "fall"):
            getattr(mesh, action)(draw(st.sampled_from([D0, D1, D2])))
        elif action == "expire":
            mesh.desk.expire_orphans("nobody came")
        elif action == "close" and (here := [client for client in mesh.clients if not client.closed]):
            client = draw(st.sampled_from(here))
            sends = mesh.desk.close(client.choices)
            client.closed = True
            mesh.take(sends)
        elif action == "again" and mesh.said:
            mesh.hear(*draw(st.sampled_from(mesh.said)))
        elif streams:
            sender, handle = draw(st.sampled_from(streams))
            if action == "finish":
                mesh.finish(sender, handle)
            elif action == "reject":
                del mesh.streams[sender][handle]
                mesh.desk.rejected(Rejected((Handle(handle),), ErrorKind.INTERNAL, "no"))
            elif action in ("step", "lose"):
                mesh.step(sender, handle, draw(st.integers(1, 3)), lost=action == "lose")
    mesh.rise(D0)
    for sender, handle in mesh.open_streams():
        mesh.finish(sender, handle)
    mesh.desk.check()
    assert not mesh.desk.by_handle
    assert not mesh.desk.orphans
    assert set(mesh.desk.load.values()) <= {0}
    for client in mesh.clients:
        for choice in client.choices:
            got = client.tokens.get(choice.index, [])
            expected = [truth(choice.submit.request_ids[0], index) for index in range(len(got))]
            assert got == choice.token_ids.tolist() == expected
            assert client.texts.get(choice.index, "") == "".join(map(word, expected))
            assert client.closed or choice.index in client.ends
            assert (choice.index in client.ends) == (choice.finished is not None)
