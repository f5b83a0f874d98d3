"""The journal: what is admitted, admitted again, told to frontends; against deaths of schedulers and the coordinator."""

from array import array
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, models

from meshlm.detokenizer.aborts import STRANGER_ROWS
from meshlm.detokenizer.attempts import COORDINATOR, MAX_ATTEMPTS
from meshlm.detokenizer.core import Detokenizer
from meshlm.detokenizer.decode import TokenTable
from meshlm.detokenizer.events import Effect, Encode, Encoded, Event, PeerLost, PeerUp, Received, Send
from meshlm.detokenizer.tokenizer_files import LoadedTokenizer
from meshlm.protocol.admit_edge import AbortRequests, Admit, RankLost, Readmit, Refused, Routed, SchedulerLife
from meshlm.protocol.columns import ints, pack_i32
from meshlm.protocol.ids import ErrorKind, FinishReason, Handle, Identity, Incarnation, RequestId, Role
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.text_edge import Abort, Attach, Rejected, Submit, TextDeltas, TextParams, TokenPrompt
from meshlm.protocol.token_edge import Disown, Ended, First, StillThere, TokenDeltas

F0, F1 = Identity(Role.FRONTEND), Identity(Role.FRONTEND, 1)
S0, S1 = Identity(Role.SCHEDULER), Identity(Role.SCHEDULER, 1)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TABLE = TokenTable(
    LoadedTokenizer(
        Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(LETTERS)}, "a")), {}, frozenset(), True
    )
)


def token_ids(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


class Bench:
    """A detokenizer whose coordinator is there, and a check after every event."""

    def __init__(self, coordinator: int = 1) -> None:
        self.core = Detokenizer(TABLE, len(LETTERS), 100)
        if coordinator:
            self.up(COORDINATOR, coordinator)

    def event(self, event: Event) -> list[Effect]:
        effects = self.core.handle(event)
        self.core.check()
        return effects

    def says(self, sender: Identity, message: object, life: int = 1) -> list[Effect]:
        return self.event(Received(sender, Incarnation(life), message))  # type: ignore[arg-type]

    def up(self, identity: Identity, life: int = 1) -> list[Effect]:
        return self.event(PeerUp(identity, Incarnation(life)))

    def lost(self, identity: Identity, life: int = 1) -> list[Effect]:
        return self.event(PeerLost(identity, Incarnation(life)))

    def submit(self, name: str = "r", prompt: str = "hi", max_tokens: int = 9, **text: object) -> list[Effect]:
        """One request of frontend F0, encoded."""
        submit = Submit(
            (Handle(len(name)),),
            (RequestId(name),),
            TokenPrompt(pack_i32(token_ids(prompt))),
            SamplingParams(),
            TextParams(**text),  # type: ignore[arg-type]
            max_tokens,
        )
        (encode,) = self.says(F0, submit)
        assert isinstance(encode, Encode)
        _, *effects = self.event(Encoded(encode.job, array("i", token_ids(prompt))))
        return effects

    def routed(self, request: Admit, scheduler: Identity = S0, life: int = 1) -> list[Effect]:
        return self.says(COORDINATOR, Routed(request.work.handle, scheduler, Incarnation(life)))

    def tokens(
        self,
        request: Admit,
        start: int,
        text: str,
        scheduler: Identity = S0,
        end: FinishReason | None = None,
        life: int = 1,
    ) -> list[Effect]:
        """The scheduler's news; an attempt's first tokens say how much of the prompt was cached."""
        ids, first = pack_i32(token_ids(text)), start == len(request.work.emitted) // 4
        ended = [] if end is None else [Ended(0, end)]
        begun = {0: First(0)} if first else {}
        handle, counts = pack_i32([request.work.handle]), pack_i32([len(text)])
        deltas = TokenDeltas(handle, pack_i32([start]), counts, ids, ended, first=begun)
        return self.says(scheduler, deltas, life)

    def abort(self, name: str) -> list[Effect]:
        return self.says(F0, Abort((RequestId(name),)))

    def news(self) -> list[tuple[Identity, int, int, str, FinishReason | None]]:
        """What frontends are told: to, handle, start, text, end."""
        found = []
        for send in self.core.batches():
            batch = send.message
            assert isinstance(batch, TextDeltas)
            ends = {end.row: end.reason for end in batch.finished}
            for row, (handle, start) in enumerate(zip(ints(batch.handles), ints(batch.starts), strict=True)):
                found.append((send.to, handle, start, batch.texts[row], ends.get(row)))
        return found


def admits(effects: Sequence[Effect]) -> list[Admit]:
    """All effects are Admits."""
    found = [effect.message for effect in effects if isinstance(effect, Send) and effect.to == COORDINATOR]
    assert len(found) == len(effects)
    return [message for message in found if isinstance(message, Admit)]


def admitted(effects: Sequence[Effect]) -> Admit:
    (found,) = admits(effects)
    return found


# --- schedulers die ---


def test_a_dead_schedulers_requests_are_admitted_again() -> None:
    bench = Bench()
    first, other = admitted(bench.submit("a")), admitted(bench.submit("bb"))
    assert bench.routed(first, S0) == bench.routed(other, S1) == []
    bench.tokens(first, 0, "xy")
    again = admitted(bench.lost(S0))
    assert (again.work.request_id, again.work.attempt, ints(again.work.emitted)) == ("a", 1, token_ids("xy"))
    assert again.work.handle != first.work.handle
    assert again.lost == (SchedulerLife(S0, Incarnation(1)),)
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
    assert (again.work.attempt, again.lost) == (1, (SchedulerLife(S0, Incarnation(1)),))
    assert again.work.handle != first.work.handle
    assert bench.routed(first, S0) == [], "an old handle"
    bench.up(S0, 2)
    assert bench.routed(again, S0, 2) == []
    assert admitted(bench.lost(S0, 2)).work.attempt == 2


def test_routed_to_a_life_before_the_one_that_is_known() -> None:
    bench = Bench()
    first = admitted(bench.submit())
    bench.up(S0, 5)
    assert admitted(bench.routed(first, S0, 4)).lost == (SchedulerLife(S0, Incarnation(4)),)


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


def test_a_request_whose_schedulers_always_die_is_given_up() -> None:
    bench = Bench()
    effects = bench.submit()
    for life in range(1, MAX_ATTEMPTS + 1):
        request = admitted(effects)
        bench.routed(request, S0, life)
        effects = bench.lost(S0, life)
    assert effects == []
    assert [row[4] for row in bench.news()] == [FinishReason.ERROR]
    assert not bench.core.by_id


def test_a_request_that_gets_tokens_survives_any_number_of_deaths() -> None:
    bench = Bench()
    request = admitted(bench.submit(max_tokens=20))
    for life in range(1, 3 * MAX_ATTEMPTS):
        bench.routed(request, S0, life)
        bench.tokens(request, life - 1, "x", life=life)
        request = admitted(bench.lost(S0, life))
        assert len(ints(request.work.emitted)) == life
        bench.up(S0, life + 1)


def test_all_deaths_are_told_that_the_coordinator_may_not_know_of() -> None:
    """Two ranks die; it may hear of it later than we."""
    bench = Bench()
    bench.up(S0)
    bench.up(S1)
    bench.routed(admitted(bench.submit()), S0)
    bench.lost(S1)
    again = admitted(bench.lost(S0))
    assert set(again.lost) == {SchedulerLife(S0, Incarnation(1)), SchedulerLife(S1, Incarnation(1))}
    bench.up(S1, 2)
    assert admitted(bench.submit("bb")).lost == (
        SchedulerLife(S1, Incarnation(1)),
        SchedulerLife(S0, Incarnation(1)),
    )


# --- its rank gives a request back ---


def test_what_was_given_back_is_admitted_again_as_often_as_need_be() -> None:
    bench = Bench()
    request = admitted(bench.submit())
    for attempt in range(1, 3 * MAX_ATTEMPTS):
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
    for life in range(1, 3 * MAX_ATTEMPTS):
        bench.routed(request, S0, life)
        if life % (MAX_ATTEMPTS - 1) == 0:
            bench.tokens(request, len(ints(request.work.emitted)), "x", life=life)
        request = admitted(bench.says(COORDINATOR, Readmit((request.work.handle,))))
        bench.routed(request, S0, life)
        request = admitted(bench.lost(S0, life))
        bench.up(S0, life + 1)
    bench = Bench()
    request = admitted(bench.submit())
    for life in range(1, MAX_ATTEMPTS + 1):
        request = admitted(bench.says(COORDINATOR, Readmit((request.work.handle,))))
        bench.routed(request, S0, life)
        effects = bench.lost(S0, life)
        if life < MAX_ATTEMPTS:
            request = admitted(effects)
            bench.up(S0, life + 1)
    assert effects == []
    assert [row[4] for row in bench.news()] == [FinishReason.ERROR]


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
    assert ints(again.work.emitted) == token_ids("x")
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
    assert (again.work.attempt, again.lost) == (1, (SchedulerLife(S0, Incarnation(1)),))


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
    assert [(request.work.request_id, ints(request.work.emitted)) for request in again] == [
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
    assert (again.work.request_id, ints(again.work.emitted)) == ("bb", token_ids("x"))
    effects = bench.says(COORDINATOR, RankLost(SchedulerLife(S0, Incarnation(1))), 2)
    assert effects == [Send(S0, StillThere(pack_i32([first.work.handle])))]


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


def test_a_refusal_names_the_field() -> None:
    bench = Bench()
    first = admitted(bench.submit())
    refused = Refused(first.work.handle, ErrorKind.INVALID, "no such rank", "X-data-parallel-rank")
    (send,) = bench.says(COORDINATOR, refused)
    assert send == Send(F0, Rejected((Handle(1),), ErrorKind.INVALID, "no such rank", "X-data-parallel-rank"))
    assert not bench.core.by_id


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
