"""Pages that others may read: those whose step is done."""

from meshlm.protocol.edges.step import HASH_BYTES, StepPlan
from meshlm.protocol.wire.ids import BlockId, StepId
from meshlm.scheduler_proc.connectors.settled import Settled
from meshlm.scheduler_proc.kv.pool import BlockPool


class Steps:
    """A pool, and plans that tell of it."""

    def __init__(self, num_pages: int = 4) -> None:
        self.pool = BlockPool(num_pages)
        self.settled = Settled(self.pool)
        self.step = 0

    def plan(self) -> StepId:
        self.step += 1
        forgotten, remembered, hashes = self.pool.take_changes()
        columns = {"forgotten": forgotten, "remembered": remembered, "hashes": hashes}
        self.settled.planned(StepPlan(1, StepId(self.step), b"", b"", b"", b"", 0, **columns))  # type: ignore[arg-type]
        return StepId(self.step)

    def write(self, number: int, width: int = 1) -> list[BlockId]:
        pages = self.pool.allocate(width)
        self.pool.cache_block(key(number), pages)
        return pages


def key(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "little")


def test_a_key_is_settled_with_the_result_of_its_step() -> None:
    steps = Steps()
    pages = steps.write(1, width=2)
    assert steps.settled.find(key(1)) == []
    first = steps.plan()
    steps.write(2)
    second = steps.plan()
    assert steps.settled.find(key(1)) == []
    assert steps.settled.done(first) == [key(1)]
    assert steps.settled.find(key(1)) == pages
    assert steps.settled.find(key(2)) == []
    assert steps.settled.done(second) == [key(2)]
    assert steps.settled.done(second) == []


def test_a_page_that_a_later_step_in_flight_writes_again_waits_for_that_one() -> None:
    """Evicted, and computed anew under the same key at the same page."""
    steps = Steps(num_pages=1)
    steps.pool.free(steps.write(1))
    first = steps.plan()
    (page,) = steps.write(1)
    assert steps.settled.done(first) == [key(1)], "the plan that says so is not made yet"
    assert steps.settled.find(key(1)) == [], "and yet it is not settled"
    steps.pool.free([page])
    second = steps.plan()
    steps.write(1)
    third = steps.plan()
    assert steps.settled.done(second) == []
    assert steps.settled.find(key(1)) == []
    assert steps.settled.done(third) == [key(1)]
    assert steps.settled.find(key(1)) == [page]


def test_what_was_loaded_is_settled_and_not_told() -> None:
    steps = Steps()
    pages = steps.write(1)
    steps.settled.loaded(key(1), pages)
    steps.write(2)
    assert steps.settled.done(steps.plan()) == [key(2)]
    assert steps.settled.find(key(1)) == pages


def test_a_page_that_was_loaded_and_computed_for_another_key_is_told() -> None:
    steps = Steps(num_pages=1)
    pages = steps.write(1)
    steps.settled.loaded(key(1), pages)
    steps.pool.free(pages)
    steps.write(2)
    assert steps.settled.done(steps.plan()) == [key(2)]


def test_nothing_is_settled_after_a_reset() -> None:
    steps = Steps()
    pages = steps.write(1)
    first = steps.plan()
    steps.pool.reset_prefix_cache()
    steps.settled.reset()
    assert steps.settled.done(first) == []
    steps.pool.cache_block(key(1), pages)
    assert steps.settled.find(key(1)) == []
