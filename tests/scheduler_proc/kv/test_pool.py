"""The pool tells its changes: whoever follows them has the prefix cache, and hands it to the next pool."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.protocol.edges.step import HASH_BYTES, StepPlan
from meshlm.protocol.wire.columns import ints
from meshlm.protocol.wire.ids import StepId
from meshlm.scheduler_proc.kv.pool import BlockPool
from meshlm.workers.kv.mirror import PrefixCacheMirror

NUM_BLOCKS = 6


def name(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "little")


def plan(pool: BlockPool, session: int = 1) -> StepPlan:
    forgotten, remembered, hashes = pool.take_changes()
    return StepPlan(
        session, StepId(1), b"", b"", b"", b"", 0, forgotten=forgotten, remembered=remembered, hashes=hashes
    )


def known(directory: PrefixCacheMirror) -> dict[int, bytes]:
    blocks, hashes = directory.columns()
    split = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
    return dict(zip(ints(blocks), split, strict=True))


def content(pool: BlockPool, names: range) -> dict[int, bytes]:
    return {block: name(number) for number in names for block in pool.find(name(number)) or ()}


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "release", "remember", "forget", "tell"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_the_changes_give_the_cache(actions: list[tuple[str, int]]) -> None:
    pool, directory, held = BlockPool(NUM_BLOCKS), PrefixCacheMirror(), []
    for action, number in actions:
        match action:
            case "allocate" if pool.num_free:
                held += pool.allocate(1)
            case "release" if held:
                pool.free([held.pop(number % len(held))])
            case "remember" if held:
                pool.cache_block(name(number), [held[number % len(held)]])
            case "forget":
                if number == 0:
                    pool.reset_prefix_cache()
            case "tell":
                directory.apply(plan(pool))
                assert known(directory) == content(pool, range(10))
    directory.apply(plan(pool))
    found = known(directory)
    assert found == content(pool, range(10))
    pool.check([held])
    heir = BlockPool(NUM_BLOCKS)
    heir.restore(list(found), list(found.values()))
    heir.check([])
    assert content(heir, range(10)) == found
    directory.apply(plan(heir, session=2))
    assert known(directory) == found, "the first plan of a session says all that was taken over"


def test_what_is_restored_is_given_away_last_and_in_its_order() -> None:
    pool = BlockPool(4)
    pool.restore([2, 0], [name(1), name(2)])
    assert pool.allocate(4) == [1, 3, 2, 0]


def test_what_cannot_be_is_not_restored() -> None:
    pool = BlockPool(2)
    (used,) = pool.allocate(1)
    pool.restore([used, 7, -1, 1], [name(1), name(2), name(3), name(4)])
    assert content(pool, range(10)) == {1: name(4)}
    pool.check([[used]])


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "free", "cache", "reset", "tell"]), st.integers(0, 9)), max_size=60)
)
def test_pages_of_one_key_are_told_side_by_side(actions: list[tuple[str, int]]) -> None:
    """Keys below 5 have one page, others three."""
    pool, mirror, held = BlockPool(9), PrefixCacheMirror(), []

    def told() -> dict[bytes, list[int]]:
        mirror.apply(plan(pool))
        blocks, hashes = mirror.columns()
        pages: dict[bytes, list[int]] = {}
        for nth, block in enumerate(ints(blocks)):
            pages.setdefault(hashes[nth * HASH_BYTES : (nth + 1) * HASH_BYTES], []).append(block)
        return pages

    def cached(where: BlockPool) -> dict[bytes, list[int]]:
        return {name(number): list(where.find(name(number)) or ()) for number in range(10) if where.find(name(number))}

    for action, number in actions:
        width = 1 if number < 5 else 3
        match action:
            case "allocate" if pool.num_free >= width:
                held.append(pool.allocate(width))
            case "free" if held:
                pool.free(held.pop(number % len(held)))
            case "cache":
                fitting = [pages for pages in held if len(pages) == width]
                if fitting:
                    pool.cache_block(name(number), fitting[-1])
            case "reset" if number == 0:
                pool.reset_prefix_cache()
            case "tell":
                assert told() == cached(pool)
        pool.check(held)
    assert told() == cached(pool)
    heir = BlockPool(9)
    blocks, hashes = mirror.columns()
    heir.restore(ints(blocks), [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)])
    assert cached(heir) == cached(pool)
    heir.check([])


def test_what_the_mirror_cannot_tell_it_leaves_out_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, mirror = BlockPool(6), PrefixCacheMirror()
    pool.cache_block(name(1), pool.allocate(3))
    pool.cache_block(name(2), pool.allocate(3))
    mirror.apply(plan(pool))
    monkeypatch.setattr("meshlm.workers.kv.mirror.MAX_KEPT", 4)
    assert ints(mirror.columns()[0]) == [3, 4, 5]


def test_pages_of_one_key_of_which_one_cannot_be_are_not_restored() -> None:
    pool = BlockPool(3)
    pool.restore([0, 3, 1, 2], [name(1), name(1), name(2), name(2)])
    assert content(pool, range(3)) == {1: name(2), 2: name(2)}
    pool.check([])


def test_pages_of_one_key_are_told_in_the_order_of_their_groups() -> None:
    pool, mirror = BlockPool(3), PrefixCacheMirror()
    for number, page in enumerate(pool.allocate(3)):
        pool.cache_block(name(number), [page])
        mirror.apply(plan(pool))
        pool.free([page])
    first = pool.allocate(3)
    for page in first:
        pool.free([page])
    again = pool.allocate(3)
    assert again == [2, 1, 0]
    pool.cache_block(name(7), again)
    mirror.apply(plan(pool))
    assert ints(mirror.columns()[0]) == again
