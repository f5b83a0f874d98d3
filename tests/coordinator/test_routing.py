"""Which rank a request goes to: the prefix index, the policies, the ledger."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.coordinator.ledger import Entry, Rank
from meshlm.coordinator.prefix_index import PrefixIndex, chain_of, tokens_at
from meshlm.coordinator.routing import MISS_WEIGHT, PREFILL_WEIGHT, Policy, Router
from meshlm.protocol.edges.admit import EngineRequest, Load, SchedulerIncarnation, Started
from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.columns import pack_i32
from meshlm.protocol.wire.ids import Handle, Identity, Incarnation, RequestId, Role

LIFE = Incarnation(1)
names = (RequestId(f"r{number}") for number in range(10**9))


def work(prompt: list[int] | range, max_tokens: int = 10, salt: str = "", eos: tuple[int, ...] = ()) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, eos_token_ids=eos)
    return EngineRequest(next(names), Handle(1), pack_i32(prompt), sampling, cache_salt=salt)


def load(free: int = 10_000, **more: object) -> Load:
    return Load(0, 0, 10_000, free, 0, **more)  # type: ignore[arg-type]


def router(num_ranks: int, policy: Policy = "cache-aware") -> Router:
    found = Router(policy, prefix_caching=True)
    for number in range(num_ranks):
        rank = Rank(Identity(Role.SCHEDULER, number), LIFE)
        found.add(rank)
        found.load(rank, load())
    found.check()
    return found


def send(where: Router, request: EngineRequest, wanted: int = -1) -> int:
    """Dispatch; the number of the rank."""
    choice = where.choose(request, wanted)
    assert choice is not None
    where.dispatch(choice, request, LIFE, wanted != -1)
    where.check()
    return choice.rank.number


def rank_of(where: Router, number: int) -> Rank:
    return where.ranks[Identity(Role.SCHEDULER, number)]


def end(where: Router, number: int, request: EngineRequest) -> None:
    where.load(rank_of(where, number), load(ended=(request.request_id,)))
    where.check()


# --- chunks ---


def test_a_chain_has_full_chunks_only_and_grows_coarser() -> None:
    for length, depth in ((63, 0), (64, 1), (127, 1), (1024, 16), (1279, 16), (1280, 17), (2048, 20), (131_072, 524)):
        chain = chain_of(pack_i32(range(length)), "")
        assert len(chain) == depth
        assert tokens_at(depth) <= length


def test_chains_share_what_prompts_share() -> None:
    one, other = list(range(3000)), list(range(3000))
    other[1500] = -1
    first, second = chain_of(pack_i32(one), ""), chain_of(pack_i32(other), "")
    same = sum(a == b for a, b in zip(first, second, strict=True))
    assert tokens_at(same) == 1280
    assert not set(first) & set(chain_of(pack_i32(one), "salt"))


def test_a_2k_prompt_costs_little() -> None:
    index = PrefixIndex()
    prompts = [pack_i32(random.Random(seed).choices(range(50_000), k=2048)) for seed in range(50)]
    times = []
    for now, prompt in enumerate(prompts * 4):
        begun = time.perf_counter()
        chain = chain_of(prompt, "")
        index.find(chain)
        index.add(now % 8, chain, now, 1 << 20, 1 << 16)
        times.append(time.perf_counter() - begun)
    assert sorted(times)[len(times) // 2] < 200e-6, "50 µs on a quiet machine"


prompts = st.lists(st.integers(0, 1), max_size=6).map(lambda bits: [bit for bit in bits for _ in range(64)])


@given(st.lists(st.tuples(st.sampled_from(["add", "forget", "older"]), st.integers(0, 3), prompts), max_size=40))
def test_the_index_tells_the_longest_prefix_of_each_rank(history: list[tuple[str, int, list[int]]]) -> None:
    index = PrefixIndex()
    known: dict[int, dict[int, int]] = {number: {} for number in range(4)}
    for now, (action, rank, prompt) in enumerate(history, 1):
        chain = chain_of(pack_i32(prompt), "")
        if action == "add":
            index.add(rank, chain, now, 10**6, 10**6)
            known[rank].update(dict.fromkeys(chain, now))
        elif action == "forget":
            index.forget(rank)
            known[rank].clear()
        else:
            index.forget(rank, now // 2)
            known[rank] = {chunk: at for chunk, at in known[rank].items() if at >= now // 2}
        index.check()
        for other in known:
            depth = next((n for n, chunk in enumerate(chain) if chunk not in known[other]), len(chain))
            told = next((tokens for tokens, mask in index.find(chain) if mask >> other & 1), 0)
            assert told == tokens_at(depth)


def test_the_index_is_bounded() -> None:
    index = PrefixIndex()
    for now in range(100):
        index.add(0, chain_of(pack_i32([now] * 2048), ""), now, 10_000, 1000)
        index.add(1, chain_of(pack_i32([now] * 2048), ""), now, 10**9, 50)
        index.check()
    assert sum(index._tokens.values()) <= 10_000 + 50 * 256
    assert len(index._chunks[1]) == 50


# --- policies ---


def test_equal_prefixes_meet_their_cache() -> None:
    where = router(4)
    systems = [[user] * 2048 for user in range(4)]
    homes = [send(where, work(system)) for system in systems]
    assert sorted(homes) == [0, 1, 2, 3]
    for turn in range(3):
        assert [send(where, work(system + [turn] * 64)) for system in systems] == homes


@pytest.mark.parametrize("policy", ["cache-aware", "least-loaded"])
def test_idle_ranks_take_turns(policy: Policy) -> None:
    """One request after the other: with the lowest number first, one cache would be worn out and the others stay empty."""
    where = router(4, policy)
    went = []
    for number in range(12):
        request = work([number] * 200)
        went.append(send(where, request))
        end(where, went[-1], request)
    assert went == [0, 1, 2, 3] * 3
    if policy == "cache-aware":
        assert [send(where, work([number] * 200)) for number in range(4)] == went[:4], "each prefix is where it was"


def test_a_swamped_rank_sheds_its_prefix() -> None:
    where = router(2)
    system = [1] * 2048
    homes = [send(where, work([*system, number], max_tokens=200)) for number in range(40)]
    assert homes[:4] == [0, 0, 0, 0]
    assert abs(homes.count(0) - homes.count(1)) <= 12


def test_salts_do_not_share() -> None:
    where = router(2)
    system = [1] * 2048
    assert send(where, work(system, salt="a")) == 0
    assert send(where, work(system, salt="b")) == 1


def test_least_loaded_knows_no_prefixes() -> None:
    where = router(2, "least-loaded")
    assert where.index is None
    assert [send(where, work([1] * 2048)) for _ in range(4)] == [0, 1, 0, 1]


def test_round_robin_goes_round_those_that_serve() -> None:
    where = router(3, "round-robin")
    where.load(rank_of(where, 1), load(serving=False))
    assert [send(where, work([1], max_tokens=n)) for n in (900, 1, 900, 1)] == [0, 2, 0, 2]
    choice = where.choose(work([1]), again=True)
    assert choice is not None
    assert choice.rank.number == 2, "what was taken from a full rank goes to the least loaded"


def test_a_lost_rank_is_not_chosen_by_any_policy() -> None:
    policies: list[Policy] = ["cache-aware", "least-loaded", "round-robin"]
    for policy in policies:
        where = router(2, policy)
        prompt = [1] * 2048
        send(where, work(prompt), wanted=0)
        for _ in range(3):
            choice = where.choose(work(prompt), lost=(SchedulerIncarnation(Identity(Role.SCHEDULER, 0), LIFE),))
            assert choice is not None
            assert choice.rank.number == 1
        for later in range(2):
            dead = SchedulerIncarnation(Identity(Role.SCHEDULER, 0), Incarnation(LIFE + later))
            assert where.choose(work(prompt), 0, (dead,)) is None, "with all lives before"
        both = tuple(SchedulerIncarnation(Identity(Role.SCHEDULER, index), LIFE) for index in range(2))
        assert where.choose(work(prompt), -1, both) is None


def test_a_miss_takes_back_what_was_guessed() -> None:
    where = router(1)
    old, new = work([1] * 2048), work([2] * 2048)
    for request in (old, new):
        send(where, request)
    again = work([2] * 2048)
    send(where, again)
    assert rank_of(where, 0).requests[again.request_id].cached == 2048
    where.load(rank_of(where, 0), load(started=(Started(again.request_id, 0),)))
    where.check()
    for prompt, cached in ((1, 0), (2, 2048)):
        choice = where.choose(work([prompt] * 2048))
        assert choice is not None
        assert choice.cached == cached, "the older prefix is gone too, its own is computed now"


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    """Whatever the shortcuts: no rank has a lower score with the prompt's own cost."""
    dice = random.Random(seed)
    where = router(40)
    for _ in range(300):
        base = [dice.randrange(4)] * dice.choice((0, 640, 2048)) + [dice.randrange(3)] * dice.choice((10, 640))
        request = work(base, max_tokens=dice.randrange(1, 300))
        choice = where.choose(request)
        assert choice is not None
        costs = {
            rank.number: rank.score
            - MISS_WEIGHT * next((tokens for tokens, mask in choice.found if mask >> rank.number & 1), 0)
            for rank in where.ranks.values()
        }
        assert costs[choice.rank.number] == pytest.approx(min(costs.values()))
        where.dispatch(choice, request, LIFE, False)
        if dice.random() < 0.3:
            rank = dice.choice(list(where.ranks.values()))
            if rank.requests:
                end(where, rank.number, EngineRequest(next(iter(rank.requests)), Handle(1), b"", SamplingParams()))


# --- the ledger ---


def test_the_first_token_ends_the_prefill_and_tokens_shrink_what_is_left() -> None:
    where = router(1)
    request = work([1] * 1000, max_tokens=100)
    send(where, request)
    rank = rank_of(where, 0)
    assert rank.score == 100 + PREFILL_WEIGHT * 1000
    where.load(rank, load(started=(Started(request.request_id, 0),), live_tokens=1))
    assert rank.score == 99
    where.load(rank, load(live_tokens=60))
    assert rank.score == 40
    end(where, 0, request)
    assert rank.score == 0


def test_unknown_lengths_count_as_usual_ones() -> None:
    where = router(1)
    rank = rank_of(where, 0)
    send(where, work([1], max_tokens=100_000, eos=(2,)))
    assert rank.decode_tokens == 256
    generated = 0
    for _ in range(300):
        request = work([1], max_tokens=100_000, eos=(2,))
        send(where, request)
        generated += 40
        where.load(rank, load(generation_tokens=generated, ended=(request.request_id,)))
    request = work([1], max_tokens=100_000, eos=(2,))
    send(where, request)
    assert 38 <= rank.requests[request.request_id].output <= 45


def test_a_new_coordinator_counts_what_it_did_not_dispatch() -> None:
    where = router(2)
    where.load(rank_of(where, 0), Load(3, 1, 100, 50, 0))
    assert rank_of(where, 0).unknown_tokens == 4 * 256
    assert send(where, work([1])) == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["come", "start", "go"]), st.integers(0, 99))))
@settings(max_examples=50)
def test_the_ledger_is_the_sum_of_its_requests(history: list[tuple[str, str, int]]) -> None:
    rank = Rank(Identity(Role.SCHEDULER), LIFE)
    for name, action, size in history:
        if action == "come":
            rank.add(RequestId(name), Entry(size, size, 0, 0, False, 0, LIFE, size))
        elif action == "start":
            rank.started(RequestId(name))
        else:
            rank.remove(RequestId(name))
        rank.check()


# --- the queues' limit ---


def test_a_burst_counts_before_the_ranks_report() -> None:
    where = Router("least-loaded", prefix_caching=False, places=4)
    rank = Rank(Identity(Role.SCHEDULER, 0), LIFE)
    where.add(rank)
    where.load(rank, load())
    for _ in range(4 + 7):  # four start at once
        send(where, work(range(10)))
    assert not where.full(8)
    send(where, work(range(10)))
    assert where.full(8)
    where.load(rank, Load(4, 3, 10_000, 9_000, 0))
    assert not where.full(4), "what the rank has spoken of counts by its own word"
    send(where, work(range(10)))
    assert where.full(4)
