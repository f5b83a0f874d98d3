"""Ranks for prompts and ranks that decode: which gets what, what is handed off, and what happens when some are not there."""

from typing import Any

import pytest
from coordinator_bench import D0, LIFE, S0, S1, S2, Bench, admit, assigned, only, stats
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from meshlm.coordinator.ledger import Rank
from meshlm.coordinator.roles import SHORT_PROMPT, SPILL, RankRole
from meshlm.coordinator.routing import Policy, Router
from meshlm.protocol.edges.admit import Admit, Assign, EngineRequest, GiveBack, Load, Readmit, Returned, Started
from meshlm.protocol.edges.control import ChangeSettings, SetRanks
from meshlm.protocol.kv_transfer import KVTransfer
from meshlm.protocol.pool import Pool, PoolKind
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import HEAD, Handle, Identity, Incarnation, RequestId, Role
from meshlm.runtime.process.events import Send

LONG = 2048
S3 = Identity(Role.SCHEDULER, 3)


def bench(*ranks: Identity, num_prefill_ranks: int = 1) -> Bench:
    found = Bench(D0, num_ranks=4, num_prefill_ranks=num_prefill_ranks)
    for rank in ranks:
        found.join(rank)
        found.says(rank, roomy())
    return found


def roomy(num_running: int = 0, num_waiting: int = 0, **more: Any) -> Load:
    """The Load of a rank of 160,000 tokens."""
    free = more.pop("free", 10_000)
    return Load(num_running, num_waiting, 10_000, free, 0, **more)


def prompt(name: str, prompt_len: int = LONG, **more: Any) -> Admit:
    """A prompt that nobody has seen before, unless another one has its salt."""
    return admit(name, prompt_len, more.pop("max_tokens", 50), **{"cache_salt": name, **more})


def assign(mesh: Bench, request: Admit) -> tuple[Identity, Assign]:
    (send,) = only(mesh.says(D0, request), Assign)
    assert isinstance(send.message, Assign)
    return send.to, send.message


def handed(name: str, attempt: int = 0, handle: int = 1, num_crashes: int = 0) -> Returned:
    return Returned(RequestId(name), attempt, Handle(handle), D0, LIFE, num_crashes, handed_off=True)


def second(request: Admit, *tokens: int) -> Admit:
    """The same request, admitted again with its first tokens."""
    work = request.work
    return replace(
        request,
        work=replace(work, attempt=work.attempt + 1, handle=Handle(work.handle + 1), output_token_ids=pack_i32(tokens)),
    )


def test_a_prompt_is_computed_here_and_decoded_there() -> None:
    mesh = bench(S0, S1, S2)
    request = prompt("r")
    where, told = assign(mesh, request)
    assert (where, told.holder, told.hands_off) == (S0, None, True)
    ledger = mesh.core.ranks[S0]
    assert (ledger.prefill_tokens, ledger.decode_tokens) == (LONG, 1), "it leaves with its first token"
    mesh.says(S1, roomy(3, live_tokens=5))  # busier
    sends = mesh.says(S0, roomy(started=(Started(RequestId("r"), 0),), returned=(handed("r", num_crashes=1),)))
    assert only(sends, Readmit) == [Send(D0, Readmit((Handle(1),), (1,), handed_off=True))]
    assert (ledger.requests, ledger.prefill_tokens, ledger.decode_tokens) == ({}, 0, 0)
    where, told = assign(mesh, second(request, 7))
    assert (where, told.holder, told.hands_off) == (S2, S0, False)
    there = mesh.core.ranks[S2]
    assert (there.prefill_tokens, there.loading_tokens, there.decode_tokens) == (1, LONG, 49)
    mesh.says(S2, roomy(1, started=(Started(RequestId("r"), LONG),)))
    assert (there.prefill_tokens, there.loading_tokens) == (0, 0)


def test_a_prompt_that_an_idle_rank_for_prompts_knows_is_found_by_those_that_do_not() -> None:
    mesh = bench(S0, S1, S2, num_prefill_ranks=2)
    assert assign(mesh, prompt("first", cache_salt="a"))[0] == S0
    mesh.says(S0, roomy(1, started=(Started(RequestId("first"), 0),), free=0))  # full of what it must keep
    where, told = assign(mesh, prompt("again", cache_salt="a"))
    assert (where, told.holder, told.hands_off) == (S1, S0, True)
    ledger = mesh.core.ranks[S1]
    assert (ledger.prefill_tokens, ledger.loading_tokens) == (1, LONG - 1)


def test_what_a_rank_keeps_although_it_should_hand_it_off_counts_there() -> None:
    """A rank whose pages others cannot read goes on with it."""
    mesh = bench(S0, S1)
    assert assign(mesh, prompt("r"))[0] == S0
    ledger = mesh.core.ranks[S0]
    assert ledger.decode_tokens == 1
    mesh.says(S0, roomy(1, started=(Started(RequestId("r"), 0),), live_tokens=1))
    assert (ledger.prefill_tokens, ledger.decode_tokens, ledger.score) == (0, 50, 49)
    mesh.says(S0, roomy(ended=(RequestId("r"),)))
    assert (ledger.decode_tokens, ledger.score) == (0, 0)


def test_without_roles_nothing_is_said_of_holders() -> None:
    mesh = bench(S0, S1, num_prefill_ranks=0)
    assert assign(mesh, prompt("first"))[1] == Assign(prompt("first").work, D0, LIFE)
    mesh.says(S0, roomy(1, started=(Started(RequestId("first"), 0),), free=0))
    where, told = assign(mesh, prompt("again", cache_salt="first"))
    assert (where, told.holder, told.hands_off) == (S1, None, False)
    (told_stats,) = [one for one in stats(mesh.join(Identity(Role.FRONTEND))) if one.ranks]
    assert {rank.role for rank in told_stats.ranks} == {""}


@pytest.mark.parametrize(
    ("request_", "where"),
    [
        (prompt("r", SHORT_PROMPT), S1),
        (prompt("r", max_tokens=1), S0),
        (prompt("r", dp_rank=0), S0),
        (prompt("r", extras=(Pool(PoolKind.LAST),)), S0),
        (prompt("r", extras=(KVTransfer(b"{}", loads=True),)), S1),
        (prompt("r", extras=(KVTransfer(b"{}", leaves=True),)), S0),
    ],
)
def test_what_is_not_handed_off(request_: Admit, where: Identity) -> None:
    mesh = bench(S0, S1)
    went, told = assign(mesh, request_)
    assert (went, told.hands_off) == (where, False)


def test_a_prompt_that_is_just_long_enough_is_handed_off() -> None:
    where, told = assign(bench(S0, S1), prompt("r", SHORT_PROMPT + 1))
    assert (where, told.hands_off) == (S0, True)


def test_prompt_logprobs_are_computed_where_the_request_stays() -> None:
    mesh = bench(S0, S1)
    request = prompt("r")
    sampling = replace(request.work.sampling, prompt_logprobs=2)
    where, told = assign(mesh, replace(request, work=replace(request.work, sampling=sampling)))
    assert (where, told.hands_off) == (S0, False)


def test_what_a_rank_that_decodes_knows_but_for_little_goes_there_at_once() -> None:
    mesh = bench(S0, S1)
    assert assign(mesh, prompt("first", dp_rank=1, cache_salt="a"))[0] == S1
    mesh.says(S1, roomy(ended=(RequestId("first"),)))
    where, told = assign(mesh, prompt("turn", LONG + SHORT_PROMPT, cache_salt="a"))
    assert (where, told.holder, told.hands_off) == (S1, None, False)
    where, told = assign(mesh, prompt("long", LONG + 3 * SHORT_PROMPT, cache_salt="a"))
    assert (where, told.holder, told.hands_off) == (S0, S1, True)


def test_an_idle_rank_that_decodes_takes_prompts_while_those_for_them_have_queues() -> None:
    mesh = bench(S0, S1)
    assert assign(mesh, prompt("first"))[0] == S0
    where, told = assign(mesh, prompt("second", 600, handle=2))
    assert (where, told.hands_off) == (S1, False), f"the score is more than {SPILL} better"
    assert assign(mesh, prompt("third", 600, handle=3))[0] == S0, "it is not idle any more"


def test_a_small_difference_is_no_queue() -> None:
    mesh = bench(S0, S1)
    assert assign(mesh, prompt("first", int(1.9 * SPILL)))[0] == S0
    assert assign(mesh, prompt("second", 600, handle=2))[0] == S0


def test_an_idle_rank_for_prompts_decodes_while_those_that_decode_are_full() -> None:
    mesh = bench(S0, S1)
    request = prompt("r")
    assert assign(mesh, request)[0] == S0
    mesh.says(S1, roomy(9, free=LONG // 16 - 1))
    mesh.says(S0, roomy(returned=(handed("r"),)))
    where, told = assign(mesh, second(request, 7))
    assert (where, told.holder, told.hands_off) == (S0, None, False), "it is in its own cache"
    assert mesh.core.ranks[S0].prefill_tokens == 1


def test_a_request_that_loads_is_no_queue() -> None:
    mesh = bench(S0, S1)
    one, other = prompt("one"), prompt("other", handle=5)
    mesh.says(S1, roomy(1))  # it is not idle
    for request in (one, other):
        assert assign(mesh, request)[0] == S0
    mesh.says(S0, roomy(returned=(handed("one"), handed("other", handle=5))))
    assert assign(mesh, second(one, 7))[0] == S1
    mesh.says(S1, roomy(1, 1))
    assert assign(mesh, second(other, 7))[0] == S1, "although the other rank is idle"
    mesh.says(S1, roomy(1, 3))
    third = prompt("third", handle=9)
    assert assign(mesh, third)[0] == S0
    mesh.says(S0, roomy(returned=(handed("third", handle=9),)))
    assert assign(mesh, second(third, 7))[0] == S0, "one that loads nothing waits"


@pytest.mark.parametrize("died", [False, True])
def test_a_rank_that_handed_off_and_is_gone_holds_nothing(died: bool) -> None:
    """What it had is computed again: a prompt like any other."""
    mesh = bench(S0, S1, S2, num_prefill_ranks=2)
    request = prompt("r")
    assert assign(mesh, request)[0] == S0
    mesh.says(S0, roomy(returned=(handed("r"),)))
    if died:
        mesh.lost(S0)
    else:
        mesh.says(S0, roomy(serving=False))
    where, told = assign(mesh, second(request, 7))
    assert (where, told.holder, told.hands_off) == (S1, None, True)


def test_a_coordinator_that_died_meanwhile_takes_it_as_a_prompt() -> None:
    mesh = bench(S0, S1)
    sends = mesh.says(S0, roomy(returned=(handed("r"),)))
    assert only(sends, Readmit) == [Send(D0, Readmit((Handle(1),), handed_off=True))], "it was told all the same"
    where, told = assign(mesh, second(prompt("r"), 7))
    assert (where, told.holder) == (S1, S0)
    mesh.says(S0, roomy(returned=(handed("late"),)))
    mesh.tick(10.0)
    where, told = assign(mesh, second(prompt("late", handle=5), 7))
    assert (where, told.hands_off) == (S0, True)


def test_what_was_handed_off_holds_up_no_other_move_and_is_not_moved_while_it_loads() -> None:
    mesh = bench(S0, S1, S2)
    mesh.says(S2, roomy(serving=False))
    mesh.says(S1, roomy(1))  # it is not idle
    one, other = prompt("one"), prompt("other", handle=5)
    for request in (one, other):
        assert assign(mesh, request)[0] == S0
    mesh.says(S0, roomy(returned=(handed("one"), handed("other", handle=5))))
    assert assign(mesh, second(one, 7))[0] == S1
    assert len(mesh.core.moving) == 0
    mesh.says(S1, roomy(1, 1))
    sends = mesh.says(S2, roomy())  # it is free
    assert not only(sends, GiveBack)
    entry = mesh.core.ranks[S1].requests[RequestId("one")]
    assert (entry.leg, entry.loaded) == (RankRole.DECODE, LONG)


def test_prompts_that_wait_move_to_an_idle_rank_that_decodes() -> None:
    mesh = bench(S0)
    for number in range(4):
        assert assign(mesh, prompt(f"r{number}", handle=number))[0] == S0
    mesh.says(S0, roomy(1, 3))
    mesh.join(S1)
    sends = mesh.says(S1, roomy())
    (told,) = only(sends, GiveBack)
    assert told.to == S0
    assert isinstance(told.message, GiveBack)
    assert RequestId("r3") in told.message.request_ids


def test_a_rank_without_workers_gives_its_requests_to_those_for_prompts() -> None:
    mesh = bench(S0, S1, S2)
    request = prompt("r")
    assert assign(mesh, request)[0] == S0
    mesh.says(S0, roomy(returned=(handed("r"),)))
    where, _ = assign(mesh, second(request, 7))
    mesh.says(where, roomy(1, started=(Started(RequestId("r"), LONG),)))
    sends = mesh.says(where, roomy(0, 1, serving=False))
    assert only(sends, GiveBack) == [Send(where, GiveBack((RequestId("r"),)))]
    back = Returned(RequestId("r"), 1, Handle(2), D0, LIFE)
    assert only(mesh.says(where, roomy(0, 0, serving=False, returned=(back,))), Readmit)
    where, told = assign(mesh, second(second(request, 7), 7, 8))
    assert (where, told.hands_off) == (S0, True), "which has the prompt in its cache"
    assert mesh.core.ranks[S0].prefill_tokens == 2


def test_roles_change_while_requests_run() -> None:
    mesh = bench(S0, S1, S2)
    running = prompt("running")
    assert assign(mesh, running)[0] == S0
    mesh.says(HEAD, ChangeSettings({"dp_roles": "prefill:2,decode:2"}))
    assert [rank.role for rank in mesh.core.ranks.values()] == [RankRole.PREFILL, RankRole.PREFILL, RankRole.DECODE]
    assert assign(mesh, prompt("next", handle=3))[0] == S1
    mesh.says(S0, roomy(returned=(handed("running"),)))
    assert assign(mesh, second(running, 7))[0] == S2
    mesh.says(HEAD, ChangeSettings({"max_waiting": 7}))
    assert (mesh.core.max_waiting, mesh.core.router.num_prefill_ranks) == (7, 2)
    mesh.says(HEAD, SetRanks(2))
    where, told = assign(mesh, prompt("last", handle=9))
    assert (where, told.hands_off) == (S0, False), "no rank decodes"


def test_figures_name_roles_and_count_hand_offs() -> None:
    mesh = bench(S0, S1)
    assert assigned(mesh, prompt("r")) == S0
    mesh.says(S0, roomy(returned=(handed("r"),), num_hand_offs=1))
    (told,) = [one for one in stats(mesh.join(Identity(Role.FRONTEND))) if one.ranks]
    assert [(rank.role, rank.num_hand_offs) for rank in told.ranks] == [("prefill", 1), ("decode", 0)]


def test_round_robin_goes_round_within_a_role() -> None:
    where = Router("round-robin", prefix_caching=True)
    where.set_roles(2)
    for number in range(4):
        rank = Rank(Identity(Role.SCHEDULER, number), LIFE)
        where.add(rank)
        where.load(rank, roomy())
    went = []
    for number in range(4):
        choice = where.choose(prompt(f"r{number}").work)
        assert choice is not None
        went.append(choice.rank.number)
    assert went == [0, 1, 0, 1]
    where.check()


# --- whatever happens ---

lens = st.sampled_from([1, SHORT_PROMPT, SHORT_PROMPT + 1, 1024, LONG])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["cache-aware", "least-loaded", "round-robin"]),
    st.lists(
        st.tuples(
            st.sampled_from(["prompt", "prompt", "hand off", "end", "start", "stop", "roles"]), st.integers(0, 3), lens
        ),
        max_size=60,
    ),
)
def test_no_request_starves(policy: Policy, history: list[tuple[str, int, int]]) -> None:
    """While any rank serves, each leg of each request gets one; of the right role where one serves and it is not beaten by idleness."""
    where = Router(policy, prefix_caching=True, places=4)
    where.set_roles(2)
    for number in range(4):
        rank = Rank(Identity(Role.SCHEDULER, number), LIFE)
        where.add(rank)
        where.load(rank, roomy())
    serving = {0, 1, 2, 3}
    handed_off: list[tuple[EngineRequest, Rank]] = []
    for step, (action, number, length) in enumerate(history):
        rank = where.ranks[Identity(Role.SCHEDULER, number)]
        if action == "prompt":
            sampling = SamplingParams(max_tokens=20)
            work = EngineRequest(RequestId(f"r{step}"), Handle(step), pack_i32([length] * length), sampling)
            _dispatch(where, work, None, serving)
        elif action == "hand off" and (
            name := next((name for name, entry in rank.requests.items() if entry.leg is RankRole.PREFILL), None)
        ):
            given_tokens = rank.requests[name].given
            where.drop(rank, name)
            tokens = pack_i32([given_tokens] * given_tokens)
            sampling = SamplingParams(max_tokens=20)
            work = EngineRequest(name, Handle(step), tokens, sampling, attempt=1, output_token_ids=pack_i32([1]))
            handed_off.append((work, rank))
        elif action == "end" and rank.requests:
            where.load(rank, roomy(ended=(next(iter(rank.requests)),), serving=number in serving))
        elif action in ("start", "stop"):
            (serving.add if action == "start" else serving.discard)(number)
            where.load(rank, roomy(serving=number in serving))
        elif action == "roles":
            where.set_roles(1 + number % 3)
        if handed_off and action != "hand off":
            _dispatch(where, *handed_off.pop(), serving)
        where.check()


def _dispatch(where: Router, work: EngineRequest, by: Rank | None, serving: set[int]) -> None:
    choice = where.choose(work, again=by is not None, handed_off=by)
    assert (choice is not None) == bool(serving), "there is a rank, and it has none"
    if choice is None:
        return
    right = [rank for rank in where.ranks.values() if rank.open and rank.role is choice.leg]
    if choice.rank.role is not choice.leg and right:
        assert choice.rank.idle, "busy with its own work"
    assert choice.holder is not choice.rank
    if choice.hands_off:
        assert choice.rank.role is RankRole.PREFILL
        assert any(rank.open and rank.role is RankRole.DECODE for rank in where.ranks.values())
    if by is not None and by.serving and choice.rank is not by:
        assert choice.holder is by
    where.dispatch(choice, work, Incarnation(1), pinned=False)
    entry = choice.rank.requests[work.request_id]
    assert entry.prefill + entry.cached + entry.loaded == entry.given
    assert min(entry.prefill, entry.loaded) >= 0
