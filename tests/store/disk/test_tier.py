"""The second tier: written behind the first, read where that is worth it, shared with other meshes, paused when it fails."""

import pytest
from store_bench import NAMESPACE, PAGE_BYTES, S0, S1, Bench, key, keys

from meshlm.protocol.edges import kv
from meshlm.protocol.edges.kv import LEASE_S, NOT_HERE
from meshlm.protocol.wire.columns import ints
from meshlm.runtime.process.events import Send
from meshlm.store.disk.content import HEADER_BYTES
from meshlm.store.disk.events import DeleteFile, FileRead, FileWritten, Listed, ListFiles, ReadFile, WriteFile
from meshlm.store.disk.tier import ANSWER_S, FIRST_RATE, LIST_S, MOST_READS, PAUSE_S, Tier

FILE = HEADER_BYTES + PAGE_BYTES
OTHERS = b"m" * kv.NAMESPACE_BYTES


def name(number: int) -> bytes:
    return NAMESPACE + key(number)


def opened(num_pages: int = 4, disk_bytes: int | None = 100 * FILE, there: dict[bytes, int] | None = None) -> Bench:
    """A store with one rank, whose folder has been listed."""
    bench = Bench(num_pages, disk_bytes=disk_bytes)
    bench.disk = dict(there or {})
    bench.opens(S0)
    bench.works()
    return bench


def tier(bench: Bench) -> Tier:
    assert bench.core.disk is not None
    return bench.core.disk


def asks(bench: Bench, numbers: list[int], **more: float) -> int:
    """FindPages that is not answered at once."""
    number = bench.next_number(S0)
    assert bench.says(S0, kv.FindPages(number, NAMESPACE, keys(numbers), b"\1" * len(numbers), **more)) == []  # type: ignore[arg-type]
    return number


def pages_of(sends: list[Send]) -> list[int]:
    (send,) = sends
    assert isinstance(send.message, kv.PagesFound)
    return ints(send.message.pages)


def test_the_folder_is_listed_before_anything_is_written() -> None:
    bench = Bench(disk_bytes=None)
    bench.opens(S0)
    bench.stores(S0, [1])
    assert bench.files == [ListFiles()]
    bench.works(1)
    assert [effect.key for effect in bench.files if isinstance(effect, WriteFile)] == [name(1)]
    bench.works()
    assert bench.disk == {name(1): FILE}
    assert tier(bench).is_flushed


def test_what_left_the_memory_is_read_again_and_then_answered() -> None:
    bench = opened(num_pages=2)
    for number in (1, 2, 3, 4):
        bench.stores(S0, [number])
        bench.works()
    assert len(bench.disk) == 4
    number = asks(bench, [1, 4, 9])
    assert [type(effect) for effect in bench.files] == [ReadFile]
    found = pages_of(bench.works())
    assert found[2] == NOT_HERE
    assert NOT_HERE not in found[:2]
    assert bench.ends(S0, number)
    told = bench.core.told()
    assert told.counters["kv_store_hits"] == {"memory": 1.0, "disk": 1.0}
    assert told.counters["kv_store_stored"] == {"memory": 4.0, "disk": 4.0}
    assert told.counters["kv_store_read_bytes"] == {"disk": float(FILE), "memory": 200.0}
    assert bench.finds(S0, [1])[1] != [], "it is in the memory now"


def test_a_store_that_was_started_again_has_what_the_folder_has() -> None:
    bench = opened(there={name(1): FILE, name(2): FILE, OTHERS + key(3): FILE})
    asks(bench, [2, 1])
    assert NOT_HERE not in pages_of(bench.works())


def test_two_who_want_one_file_wait_for_one_read() -> None:
    bench = opened(there={name(1): FILE})
    bench.opens(S1)
    first = asks(bench, [1])
    second = bench.next_number(S1)
    assert bench.says(S1, kv.FindPages(second, NAMESPACE, keys([1]), b"\1")) == []
    assert len(bench.files) == 1
    sends = bench.works()
    assert [send.to for send in sends] == [S0, S1]
    assert bench.ends(S0, first)
    assert bench.ends(S1, second)


@pytest.mark.parametrize("failure", ["sum", "gone", "Input/output error"])
def test_what_cannot_be_read_is_not_there(failure: str) -> None:
    bench = opened(there={name(1): FILE, name(2): FILE})
    asks(bench, [1, 2])
    one, two = bench.files
    bench.files.clear()
    assert bench.event(FileRead(name(1), 0.0, failure, is_bad=failure == "sum", is_gone=failure == "gone")) == []
    assert isinstance(one, ReadFile)
    assert isinstance(two, ReadFile)
    assert pages_of(bench.event(FileRead(name(2), 0.001))) == [NOT_HERE, two.slots[0]]
    told = bench.core.told()
    assert told.counters.get("kv_store_bad_files") == ({"sum": 1.0} if failure == "sum" else None)
    assert told.gauges["kv_store_paused"] == {"disk": float(failure == "Input/output error")}
    assert (name(1) in tier(bench).sizes) == (failure == "Input/output error")
    if failure != "Input/output error":
        assert bench.finds(S0, [1])[1] == []


def test_a_file_of_another_size_is_deleted() -> None:
    bench = opened(there={name(1): FILE - 1})
    assert bench.finds(S0, [1])[1] == []
    assert bench.files == [DeleteFile(name(1))]
    assert bench.core.told().counters["kv_store_bad_files"] == {"truncated": 1.0}


def test_as_many_are_read_at_a_time_as_there_are_threads() -> None:
    bench = opened(num_pages=20, there={name(number): FILE for number in range(10)})
    asks(bench, list(range(10)))
    assert len(bench.files) == MOST_READS
    bench.works(1)
    assert len(bench.files) == MOST_READS
    assert NOT_HERE not in pages_of(bench.works())


def test_who_has_waited_for_too_long_gets_what_is_read() -> None:
    bench = opened(there={name(1): FILE, name(2): FILE})
    number = asks(bench, [1, 2])
    late = bench.files.pop()
    bench.works(1)
    assert bench.tick(ANSWER_S - 0.1) == []
    found = pages_of(bench.tick(0.1))
    assert [page == NOT_HERE for page in found] == [False, True]
    bench.event(bench.done(late))
    assert bench.finds(S0, [2])[1] != [], "it is there for the next one"
    assert bench.ends(S0, number)


def test_a_lease_that_ends_before_its_answer_was_none() -> None:
    bench = opened(there={name(1): FILE})
    number = asks(bench, [1])
    assert not bench.ends(S0, number)
    assert bench.works() == []
    assert not bench.core.memory.in_use


def test_files_that_are_read_for_a_lost_scheduler_end_with_their_read() -> None:
    bench = opened(there={name(1): FILE})
    asks(bench, [1])
    bench.lost(S0)
    assert bench.works() == []
    bench.tick(LEASE_S)
    assert not bench.core.memory.in_use


def test_computing_may_be_faster() -> None:
    """At the measured rate, with what is read for others first."""
    slow = 2 * PAGE_BYTES / FIRST_RATE
    bench = opened(num_pages=20, there={name(number): FILE for number in range(8)})
    assert bench.finds(S0, [1, 2], block_s=PAGE_BYTES / FIRST_RATE / 2)[1] == []
    assert bench.core.told().counters["kv_store_not_read"] == {"": 2.0}
    asks(bench, [1, 2], block_s=slow)
    assert bench.finds(S0, [3], block_s=slow)[1] == [], "it would wait for two others"
    asks(bench, [3, 4], block_s=slow)
    bench.read_s = 10.0
    bench.works()
    assert bench.finds(S0, [5], block_s=1.0)[1] == [], "the disk is slow"
    bench.now += 61
    asks(bench, [5], block_s=1.0)


def test_no_more_is_read_than_can_be_answered_in_time() -> None:
    bench = Bench(num_pages=4, disk_bytes=None)
    big = 400_000_000
    bench.core.memory.num_bytes = 4 * big
    bench.disk = {name(number): HEADER_BYTES + big for number in range(3)}
    bench.opens(S0, (big,))
    bench.works()
    asks(bench, [0, 1, 2])
    assert [effect.key for effect in bench.files] == [name(0)]  # type: ignore[union-attr]


def test_files_make_room_for_others() -> None:
    bench = opened(num_pages=20, disk_bytes=3 * FILE)
    for number in range(5):
        bench.stores(S0, [number])
        bench.works()
    assert list(bench.disk) == [name(2), name(3), name(4)]
    assert bench.core.told().counters["kv_store_evicted"] == {"disk": 2.0}
    assert bench.core.told().gauges["kv_store_bytes"]["disk"] == 3.0 * FILE


def test_other_meshes_files_are_left_alone_and_count() -> None:
    bench = opened(num_pages=20, disk_bytes=3 * FILE, there={OTHERS + key(9): FILE, OTHERS + key(8): FILE})
    for number in range(3):
        bench.stores(S0, [number])
        bench.works()
    assert list(bench.disk) == [OTHERS + key(9), OTHERS + key(8), name(2)]
    bench.disk[OTHERS + key(7)] = FILE
    bench.tick(LIST_S)
    bench.works()
    bench.stores(S0, [3])
    bench.works()
    assert name(3) not in bench.disk
    why = f"files may have {3 * FILE} bytes, and other meshes' have {3 * FILE}: there is no room for one more"
    assert tier(bench).failure == why


def test_a_file_that_is_larger_than_all_may_be_deletes_nothing() -> None:
    bench = opened(num_pages=20, disk_bytes=2 * FILE, there={name(1): FILE})
    bench.stores(S0, [2], width=4)
    assert bench.files == []
    assert tier(bench).failure == f"files may have {2 * FILE} bytes: there is no room for one more"
    assert set(tier(bench).sizes) == {name(1)}


def test_a_namespace_that_a_rank_opens_later_is_this_meshs() -> None:
    bench = opened(disk_bytes=2 * FILE, there={OTHERS + key(1): FILE})
    bench.says(S1, kv.OpenPages(OTHERS, (PAGE_BYTES,)))
    number = bench.next_number(S1)
    assert bench.says(S1, kv.FindPages(number, OTHERS, key(1), b"\1")) == []
    assert NOT_HERE not in pages_of(bench.works())


def test_what_another_mesh_has_added_or_deleted_is_seen_with_the_next_list() -> None:
    bench = opened(there={name(1): FILE, name(2): FILE})
    del bench.disk[name(1)]
    bench.disk[name(3)] = FILE
    bench.tick(LIST_S)
    bench.works()
    assert set(tier(bench).sizes) == {name(2), name(3)}


def test_what_is_deleted_while_a_list_is_made_does_not_come_back() -> None:
    bench = opened(num_pages=20, disk_bytes=FILE, there={name(1): FILE})
    bench.tick(LIST_S)
    listing = bench.files.pop()
    old = bench.done(listing)
    bench.stores(S0, [2])
    bench.works()
    bench.event(old)
    assert set(tier(bench).sizes) <= {name(2)}


def test_a_disk_that_fails_pauses_the_tier_and_nothing_else() -> None:
    bench = opened(num_pages=20)
    bench.stores(S0, [1])
    (write,) = bench.files
    bench.files.clear()
    assert isinstance(write, WriteFile)
    bench.event(FileWritten(name(1), failure="No space left on device"))
    assert tier(bench).failure == "No space left on device"
    assert tier(bench).is_flushed, "nothing waits for it"
    bench.stores(S0, [2])
    assert bench.files == []
    assert bench.finds(S0, [1, 2])[1] != []
    bench.tick(PAUSE_S)
    bench.works()
    assert set(bench.disk) == {name(1), name(2)}
    assert tier(bench).failure == ""


def test_a_folder_that_cannot_be_listed_is_tried_again() -> None:
    bench = Bench(disk_bytes=None)
    bench.tick()
    assert bench.files == [ListFiles()]
    bench.files.clear()
    bench.event(Listed(failure="Permission denied"))
    bench.tick(PAUSE_S - 1)
    assert bench.files == []
    bench.tick(1)
    assert bench.files == [ListFiles()]


def test_without_a_size_the_disk_says_how_much_there_may_be() -> None:
    bench = Bench(num_pages=20, disk_bytes=None)
    bench.free_bytes = 2 * FILE
    bench.disk = {name(8): FILE}
    bench.opens(S0)
    bench.works()
    for number in range(4):
        bench.stores(S0, [number])
        bench.works()
    assert len(bench.disk) == 3


def test_what_left_the_memory_before_its_turn_is_not_written() -> None:
    bench = opened(num_pages=2)
    bench.stores(S0, [1])
    bench.stores(S0, [2])
    bench.stores(S0, [3])
    bench.works()
    assert set(bench.disk) == {name(1), name(3)}
