"""S3-FIFO: what nobody asks for again passes through, what is found stays, what comes again soon is kept."""

import random
from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.store.eviction import Eviction


def name(number: int) -> bytes:
    return b"%d" % number


def never(key: bytes) -> bool:
    return False


def test_of_what_was_never_found_the_oldest_goes() -> None:
    tier = Eviction()
    for number in range(5):
        tier.add(name(number), 1)
    assert [tier.evict(never) for _ in range(6)] == [*map(name, range(5)), None]


def test_what_was_found_outlives_any_number_of_others() -> None:
    tier = Eviction()
    for number in range(10):
        tier.add(name(number), 1)
    tier.hit(name(0))
    gone = []
    for number in range(10, 200):
        gone.append(tier.evict(never))
        tier.add(name(number), 1)
        tier.check()
    assert name(0) in tier
    assert gone == [name(number) for number in range(200) if name(number) not in tier]


def test_what_comes_again_soon_is_kept() -> None:
    tier = Eviction()
    for number in range(10):
        tier.add(name(number), 1)
    assert tier.evict(never) == name(0)
    tier.add(name(0), 1)
    for number in range(10, 60):
        tier.evict(never)
        tier.add(name(number), 1)
    assert name(0) in tier


def test_what_is_found_more_often_stays_longer() -> None:
    tier = Eviction()
    for number in (0, 1):
        tier.add(name(number), 1)
    for number in (0, 0, 0, 1):
        tier.hit(name(number))
    assert [tier.evict(never) for _ in range(2)] == [name(1), name(0)]


def test_what_is_in_use_does_not_leave() -> None:
    tier = Eviction()
    for number in range(3):
        tier.add(name(number), 1)
    assert [tier.evict(lambda key: key != name(1)) for _ in range(2)] == [name(1), None]
    assert len(tier) == 2


EVENTS = st.lists(st.tuples(st.sampled_from(["add", "hit", "remove", "evict"]), st.integers(0, 15), st.integers(1, 5)))


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.sets(st.integers(0, 15), max_size=4))
def test_any_history_keeps_its_sums(events: list[tuple[str, int, int]], used: set[int]) -> None:
    tier, there = Eviction(), dict[bytes, int]()
    in_use = {name(number) for number in used}
    for what, number, size in events:
        key = name(number)
        if what == "add" and key not in there:
            tier.add(key, size)
            there[key] = size
        elif what == "hit" and key in there:
            tier.hit(key)
        elif what == "remove" and key in there:
            tier.remove(key)
            del there[key]
        elif what == "evict":
            gone = tier.evict(in_use.__contains__)
            assert (gone is None) == (there.keys() <= in_use)
            assert gone not in in_use
            there.pop(gone or b"", None)
        tier.check()
        assert (len(tier), tier.size) == (len(there), sum(there.values()))


def hit_rate(trace: list[int], num_pages: int) -> float:
    tier, hits = Eviction(), 0
    for number in trace:
        if name(number) in tier:
            tier.hit(name(number))
            hits += 1
            continue
        if len(tier) >= num_pages:
            tier.evict(never)
        tier.add(name(number), 1)
    return hits / len(trace)


def lru_hit_rate(trace: list[int], num_pages: int) -> float:
    tier, hits = OrderedDict[int, None](), 0
    for number in trace:
        if number in tier:
            tier.move_to_end(number)
            hits += 1
            continue
        if len(tier) >= num_pages:
            tier.popitem(last=False)
        tier[number] = None
    return hits / len(trace)


def test_prompts_that_come_once_do_not_push_out_those_that_come_back() -> None:
    """One lookup in three is of one of 300 prefixes, some of them more popular; all others are never asked for again."""
    draws = random.Random(7)
    once = iter(range(1000, 10**9))
    trace = [int(300 * draws.random() ** 2) if draws.random() < 1 / 3 else next(once) for _ in range(20_000)]
    ours, lru = hit_rate(trace, 200), lru_hit_rate(trace, 200)
    assert ours > 1.3 * lru
    assert ours > 0.2
