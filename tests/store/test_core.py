"""The answers of the store to schedulers: what is stored is found, and only then; leases outlive their schedulers."""

import pytest
from store_bench import NAMESPACE, PAGE_BYTES, S0, S1, Bench, key, keys

from meshlm.protocol.edges import kv
from meshlm.protocol.edges.kv import LEASE_S, NOT_HERE, PageMemory, Segment


def test_what_is_stored_is_found_by_every_rank() -> None:
    bench = Bench()
    for rank in (S0, S1):
        assert bench.opens(rank) == kv.PagesOpened((PageMemory("/proc/7/fd/9", 10, (Segment(0, 100, 100),)),))
    pages = bench.stores(S0, [1, 2, 3])
    assert len(set(pages)) == 3
    number, found = bench.finds(S1, [1, 9, 3])
    assert found == [pages[0], NOT_HERE, pages[2]]
    assert bench.ends(S1, number)
    assert not bench.ends(S1, number), "it has ended"


def test_workers_of_a_rank_lie_side_by_side() -> None:
    bench = Bench()
    opened = bench.opens(S0, (60, 40))
    assert opened is not None
    assert [memory.segments for memory in opened.memory] == [(Segment(0, 100, 60),), (Segment(60, 100, 40),)]
    assert bench.opens(S1, (100,)) == kv.PagesOpened((PageMemory("/proc/7/fd/9", 10, (Segment(0, 100, 100),)),))


def test_nothing_is_found_before_it_was_written() -> None:
    bench = Bench()
    bench.opens(S0)
    number, wanted = bench.offers(S0, [1, 2])
    assert NOT_HERE not in wanted
    assert bench.finds(S0, [1, 2])[1] == []
    assert bench.offers(S0, [1])[1] == [NOT_HERE], "somebody writes it"
    bench.says(S0, kv.PagesStored(number, b"\1\0"))
    assert bench.finds(S0, [1, 2])[1] == [wanted[0], NOT_HERE]


def test_pages_of_a_key_come_and_go_together() -> None:
    bench = Bench(num_pages=4)
    bench.opens(S0)
    pages = bench.stores(S0, [1], width=3)
    assert bench.finds(S0, [1], width=2)[1] == [], "it has three"
    number, found = bench.finds(S0, [1], width=3)
    assert found == pages
    assert bench.offers(S0, [2], width=3)[1] == [NOT_HERE] * 3, "those that are read stay"
    bench.ends(S0, number)
    bench.stores(S0, [2], width=2)
    assert bench.finds(S0, [1], width=3)[1] == []


@pytest.mark.parametrize("number_of", [lambda number: number, lambda number: number - 1])
def test_a_question_that_comes_twice_or_late_leases_nothing(number_of) -> None:  # type: ignore[no-untyped-def]
    bench = Bench()
    bench.opens(S0)
    bench.stores(S0, [1])
    number, _ = bench.finds(S0, [1])
    again = bench.says(S0, kv.FindPages(number_of(number), NAMESPACE, keys([1]), b"\1"))
    assert [send.message for send in again] == [kv.PagesFound(number_of(number), b"")]
    assert bench.ends(S0, number)
    assert not bench.core.memory.in_use


def test_a_scheduler_that_never_opened_its_pages_gets_none() -> None:
    bench = Bench()
    assert bench.finds(S0, [1])[1] == []
    assert bench.offers(S0, [1])[1] == [NOT_HERE]
    assert bench.says(S0, kv.PagesStored(2, b"\1")) == []


@pytest.mark.parametrize("ends", ["lost", "opened again", "another incarnation"])
def test_leases_of_a_lost_scheduler_hold_for_as_long_as_its_workers_may_copy(ends: str) -> None:
    bench = Bench(num_pages=2)
    bench.opens(S0)
    bench.opens(S1)
    bench.stores(S0, [1])
    reading, _ = bench.finds(S0, [1])
    writing, wanted = bench.offers(S0, [2])
    assert wanted != [NOT_HERE]
    if ends == "lost":
        bench.lost(S0)
    elif ends == "another incarnation":
        bench.lives[S0] = 2
    bench.opens(S0)
    assert not bench.ends(S0, reading)
    bench.says(S0, kv.PagesStored(writing, b"\1"))
    bench.tick(LEASE_S - 0.1)
    assert bench.offers(S1, [3])[1] == [NOT_HERE], "both slots are leased"
    assert bench.finds(S1, [2])[1] == [], "nobody said that it was written"
    bench.tick(0.2)
    assert bench.offers(S1, [3])[1] != [NOT_HERE]
    assert bench.core.memory.pages()["in_use"] == 1


def test_a_death_of_an_earlier_incarnation_ends_nothing() -> None:
    bench = Bench()
    bench.lives[S0] = 2
    bench.opens(S0)
    bench.stores(S0, [1])
    number, _ = bench.finds(S0, [1])
    bench.lost(S0, life=1)
    assert bench.ends(S0, number)


def test_pages_of_another_size_wait_until_nobody_has_the_old_ones() -> None:
    bench = Bench()
    bench.opens(S0)
    bench.stores(S0, [1])
    bench.finds(S0, [1])
    other = (2 * PAGE_BYTES,)
    refused = bench.opens(S1, other)
    assert refused is not None
    assert refused.failed == "a page has 200 bytes, and those of scheduler/0, which are in the store, have 100"
    bench.lost(S0)
    assert bench.opens(S1, other) is None, "its workers may still read"
    assert bench.tick(LEASE_S - 1) == []
    (opened,) = bench.tick(1)
    assert opened.to == S1
    assert isinstance(opened.message, kv.PagesOpened)
    assert opened.message.memory[0].num_pages == 5
    assert bench.finds(S1, [1])[1] == [], "its content is dropped"
    assert len(bench.stores(S1, range(5))) == 5


def test_each_opening_has_its_answer() -> None:
    bench = Bench()
    bench.opens(S0)
    bench.finds(S0, [1])
    bench.stores(S0, [1])
    bench.finds(S0, [1])
    bench.lost(S0)
    assert bench.opens(S1, (50,)) is None
    assert bench.opens(S1, (40,)) == kv.PagesOpened(failed="another one followed")
    (opened,) = bench.tick(LEASE_S + 1)
    assert isinstance(opened.message, kv.PagesOpened)
    assert opened.message.memory[0].segments == (Segment(0, 40, 40),)


def test_a_rank_that_waits_for_its_size_and_dies_is_forgotten() -> None:
    bench = Bench()
    bench.opens(S0)
    bench.stores(S0, [1])
    bench.finds(S0, [1])
    bench.lost(S0)
    assert bench.opens(S1, (50,)) is None
    bench.lost(S1)
    assert bench.tick(LEASE_S + 1) == []


@pytest.mark.parametrize(
    ("page_bytes", "text"),
    [
        ((1001,), "a page has 1001 bytes, and the store 1000"),
        ((), "a page has no bytes"),
        ((5, 0), "a page has no bytes"),
    ],
)
def test_pages_that_cannot_be_kept_are_refused(page_bytes: tuple[int, ...], text: str) -> None:
    assert Bench().opens(S0, page_bytes) == kv.PagesOpened((), text)


def test_what_was_found_outlives_what_was_not() -> None:
    bench = Bench(num_pages=10)
    bench.opens(S0)
    bench.stores(S0, [1, 2])
    bench.ends(S0, bench.finds(S0, [1])[0])
    for number in range(10, 40):
        bench.stores(S0, [number])
    number, found = bench.finds(S0, [1, 2])
    assert found[0] != NOT_HERE
    assert found[1] == NOT_HERE
    assert bench.ends(S0, number)


def test_of_one_prompt_the_last_block_goes_first() -> None:
    bench = Bench(num_pages=4)
    bench.opens(S0)
    bench.stores(S0, [1, 2, 3, 4])
    bench.stores(S0, [5])
    assert [page == NOT_HERE for page in bench.finds(S0, [1, 2, 3, 4])[1]] == [False, False, False, True]


def test_with_a_threshold_a_key_is_stored_when_it_is_offered_again() -> None:
    bench = Bench(threshold=2)
    bench.opens(S0)
    bench.opens(S1)
    assert bench.offers(S0, [1])[1] == [NOT_HERE]
    assert bench.offers(S1, [1, 2])[1] == [0, NOT_HERE]
    assert bench.core.told().counters["kv_store_refused"] == {"threshold": 2.0}


def test_counts_say_what_was_asked_found_stored_and_moved() -> None:
    bench = Bench(num_pages=3)
    bench.opens(S0)
    bench.stores(S0, [1, 2, 3])
    bench.ends(S0, bench.finds(S0, [1, 2, 9])[0])
    bench.stores(S0, [4])
    told = bench.core.told()
    assert told.counters["kv_store_queries"] == {"": 3.0}
    assert told.counters["kv_store_hits"] == {"memory": 2.0}
    assert told.counters["kv_store_stored"] == {"memory": 4.0}
    assert told.counters["kv_store_evicted"] == {"memory": 1.0}
    assert told.counters["kv_store_written_bytes"] == {"memory": 400.0}
    assert told.counters["kv_store_read_bytes"] == {"memory": 200.0}
    assert told.gauges["kv_store_pages"] == {"in_use": 0.0, "stored": 3.0, "free": 0.0}
    assert told.gauges["kv_store_bytes"] == {"memory": 300.0}
    assert told.gauges["kv_store_capacity_bytes"] == {"memory": 300.0}
    assert told.gauges["kv_store_hit_rate_ceiling"][""] == pytest.approx(2 / 3, abs=0.01)


def test_keys_of_another_namespace_are_other_keys() -> None:
    bench = Bench()
    bench.opens(S0)
    bench.stores(S0, [1])
    ask = kv.FindPages(bench.next_number(S0), b"m" * kv.NAMESPACE_BYTES, key(1), b"\1")
    assert [send.message for send in bench.says(S0, ask)] == [kv.PagesFound(ask.number, b"")]
