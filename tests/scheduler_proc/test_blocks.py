"""The pool tells its changes: whoever follows them has the prefix cache, and hands it to the next pool."""

from hypothesis import given
from hypothesis import strategies as st

from meshlm.protocol.columns import ints
from meshlm.protocol.ids import StepId
from meshlm.protocol.step_edge import HASH_BYTES, StepPlan
from meshlm.scheduler_proc.blocks import BlockPool
from meshlm.workers.kv.mirror import PrefixCacheMirror

NUM_BLOCKS = 6


def name(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "little")


def plan(pool: BlockPool, session: int = 1) -> StepPlan:
    forgotten, remembered, hashes = pool.take_changes()
    columns = {"forgotten": forgotten, "remembered": remembered, "hashes": hashes}
    return StepPlan(session, StepId(1), b"", b"", b"", b"", 0, **columns)


def known(directory: PrefixCacheMirror) -> dict[int, bytes]:
    blocks, hashes = directory.columns()
    split = [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
    return dict(zip(ints(blocks), split, strict=True))


def content(pool: BlockPool, names: range) -> dict[int, bytes]:
    found = {pool.find(name(number)): name(number) for number in names}
    return {block: block_hash for block, block_hash in found.items() if block is not None}


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
                pool.release([held.pop(number % len(held))])
            case "remember" if held:
                pool.remember(held[number % len(held)], name(number))
            case "forget":
                if number == 0:
                    pool.forget_all()
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
