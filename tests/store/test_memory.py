"""Slots: each has one owner, keys come and go whole, and only what is stored and not in use makes room."""

import pytest

from meshlm.protocol.counts import STORE
from meshlm.runtime.process.counts import Counts
from meshlm.store.memory import Memory, State


@pytest.fixture
def memory() -> Memory:
    found = Memory(1050, Counts(STORE))
    found.divide(100)
    return found


def test_there_are_as_many_slots_as_fit(memory: Memory) -> None:
    assert memory.pages() == {"in_use": 0, "stored": 0, "free": 10}
    assert memory.stored_bytes == 0


def test_what_is_being_written_makes_no_room(memory: Memory) -> None:
    one, two = memory.reserve(b"1", 6), memory.reserve(b"2", 4)
    assert one is not None
    assert two is not None
    assert memory.reserve(b"3", 1) is None
    memory.written(one, is_valid=True)
    memory.check()
    three = memory.reserve(b"3", 1)
    assert three is not None
    assert three.slots[0] in one.slots
    assert b"1" not in memory.keys
    memory.check()


def test_what_was_not_written_is_free_at_once(memory: Memory) -> None:
    one = memory.reserve(b"1", 6)
    assert one is not None
    memory.written(one, is_valid=False)
    memory.check()
    assert memory.pages()["free"] == 10
    assert memory.find(b"1", 6) is None


def test_what_is_in_use_stays_until_the_last_user_leaves(memory: Memory) -> None:
    one = memory.reserve(b"1", 10)
    assert one is not None
    memory.written(one, is_valid=True)
    memory.hit(one)
    memory.use(one)
    for _ in range(2):
        assert memory.reserve(b"2", 1) is None
        memory.leave(one)
        memory.check()
    assert memory.reserve(b"2", 1) is not None


@pytest.mark.parametrize("width", [0, 11])
def test_a_key_that_cannot_be_is_not_kept(memory: Memory, width: int) -> None:
    assert memory.reserve(b"1", width) is None


def test_another_size_drops_all(memory: Memory) -> None:
    one = memory.reserve(b"1", 3)
    assert one is not None
    memory.written(one, is_valid=True)
    assert one.state is State.STORED
    memory.divide(350)
    memory.check()
    assert memory.pages() == {"in_use": 0, "stored": 0, "free": 3}
    assert memory.keys == {}
