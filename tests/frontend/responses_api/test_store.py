"""The file that keeps responses."""

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshlm.frontend.responses_api import store
from meshlm.frontend.responses_api.records import Chunk, Conversation, Stored, Written
from meshlm.frontend.responses_api.store import Store, StoreFull

LEAST = b'{"output": [], "x": "%b"}' % (b"x" * 80)
AGAIN = b'{"output": [], "by": "it"}'


def stored(name: str, **changes: Any) -> Stored:
    least = Stored(
        id=name, key="k", status="completed", background=False, created=1, previous="", answer=LEAST, items=b"[]"
    )
    return msgspec.structs.replace(least, **changes)


def test_what_is_used_least_goes_first(tmp_path: Path) -> None:
    shelf = Store(tmp_path / "s", 3, 1 << 20)
    shelf.put(stored("runs", lease=99.0, holder="h"), 0.0)
    for place, name in enumerate("abc"):
        shelf.put(stored(name), 1.0 + place)
        shelf.get("a", "k", 1.5 + place)
    assert [name for name in ("runs", "a", "b", "c") if shelf.get(name, "k", 9.0)] == ["runs", "a", "c"]
    assert shelf.get("a", "other", 9.0) is None
    small = Store(tmp_path / "t", 99, 250)
    for name in "abc":
        small.put(stored(name), 1.0)
    assert sum(small.get(name, "k", 9.0) is not None for name in "abc") == 2
    shelf.close()
    small.close()


def test_a_name_is_one_keys(tmp_path: Path) -> None:
    shelf = Store(tmp_path / "s", 9, 1 << 20)
    assert shelf.put(stored("a"), 0.0)
    assert not shelf.put(stored("a", key="other", answer=b'{"output": [], "by": "other"}'), 1.0)
    assert shelf.put(stored("a", answer=AGAIN), 1.0)
    found = shelf.get("a", "k", 2.0)
    assert found is not None
    assert found.answer == AGAIN
    shelf.close()


def test_a_holder_that_is_gone_writes_no_more(tmp_path: Path) -> None:
    path = tmp_path / "s"
    one, other = Store(path, 9, 1 << 20), Store(path, 9, 1 << 20)
    assert path.stat().st_mode & 0o777 == 0o600
    one.put(stored("a", holder="one", lease=10.0), 0.0)
    assert one.write("one", [Written("a", Chunk(0, 2, b"x\n\ny\n\n"), 3, 2)], 12.0) == []
    assert other.claim("other", 11.0, 20.0, 9) == []
    (claimed,) = other.claim("other", 13.0, 20.0, 9)
    assert (claimed.tokens, claimed.next_event, claimed.attempts, claimed.holder) == (3, 2, 1, "other")
    assert one.write("one", [Written("a", Chunk(2, 1, b"z\n\n"), 4, 3)], 30.0) == ["a"]
    one.release("a", "one", 0.0)
    assert other.write("other", [Written("a", Chunk(2, 1, b"w\n\n"), 4, 3, "completed", LEAST)], 30.0) == []
    assert one.events("a", 0) == ("completed", [Chunk(1, 1, b"y\n\n"), Chunk(2, 1, b"w\n\n")])
    assert other.claim("other", 99.0, 120.0, 9) == []
    assert not one.cancel("a", "k", b"late")
    assert one.delete("a", "k")
    assert other.events("a", -1) == (None, [])
    one.close()
    other.close()


def test_many_events_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_READ", 100)
    shelf = Store(tmp_path / "s", 9, 1 << 20)
    shelf.put(stored("a", holder="h", lease=10.0), 0.0)
    for place in range(9):
        shelf.write("h", [Written("a", Chunk(place, 1, b"x" * 48 + b"\n\n"), place, place)], 10.0)
    after, found = -1, 0
    while chunks := shelf.events("a", after)[1]:
        assert len(chunks) <= 3
        after, found = chunks[-1].first, found + len(chunks)
    assert found == 9
    shelf.close()


def kept(shelf: Store, key: str, names: list[str]) -> list[str]:
    return [name for name in names if shelf.get(name, key, 99.0) is not None]


def test_a_key_that_has_more_makes_room_for_those_that_have_less(tmp_path: Path) -> None:
    """One key's small requests took the places of all others' responses."""
    shelf = Store(tmp_path / "s", 10, 1 << 20)
    shelf.put(stored("a", key="one"), 0.0)
    shelf.put(stored("b", key="two"), 0.1)
    shelf.put_conversation(Conversation("conv_c", "three", 0, b"{}"), [], 0.2)
    many = [str(number) for number in range(40)]
    for number, name in enumerate(many):
        shelf.put(stored(name, key="many"), 1.0 + number)
    assert kept(shelf, "one", ["a"]) == ["a"]
    assert kept(shelf, "two", ["b"]) == ["b"]
    assert shelf.conversations.get("conv_c", "three", 99.0) is not None
    assert kept(shelf, "many", many) == many[-7:]
    for number in range(5):
        shelf.put(stored(f"one{number}", key="one"), 50.0 + number)
    assert len(kept(shelf, "many", many)) == 4, "the key with the most has lost what it used least"
    assert len(kept(shelf, "one", ["a", *(f"one{number}" for number in range(5))])) == 4
    shelf.close()


def test_large_responses_make_room_of_their_own_key(tmp_path: Path) -> None:
    shelf = Store(tmp_path / "s", 99, 1000)
    for name in "ab":
        shelf.put(stored(name, key="one"), 0.0)
    for number in range(9):
        shelf.put(stored(str(number), key="large", answer=b'{"output": [], "x": "%b"}' % (b"x" * 300)), 1.0 + number)
    assert kept(shelf, "one", ["a", "b"]) == ["a", "b"]
    assert kept(shelf, "large", [str(number) for number in range(9)]) == ["7", "8"]
    shelf.put(stored("huge", key="large", answer=b'{"output": [], "x": "%b"}' % (b"x" * 2000)), 200.0)
    assert kept(shelf, "large", ["7", "8", "huge"]) == []
    assert kept(shelf, "one", ["a", "b"]) == ["a", "b"]
    shelf.close()


def test_what_is_computed_for_one_key_takes_no_room_of_others(tmp_path: Path) -> None:
    shelf = Store(tmp_path / "s", 4, 1 << 20)
    shelf.put(stored("a", key="one"), 0.0)
    for number in range(3):
        assert shelf.put(stored(str(number), key="many", status="queued", lease=99.0, holder="h"), 1.0)
    with pytest.raises(StoreFull):
        shelf.put(stored("4", key="many", status="queued", lease=99.0, holder="h"), 2.0)
    assert kept(shelf, "many", ["0", "1", "2", "4"]) == ["0", "1", "2"]
    assert kept(shelf, "one", ["a"]) == ["a"]
    shelf.write("h", [Written("0", None, 1, 1, "completed", LEAST)], 50.0)
    assert shelf.put(stored("4", key="many", status="queued", lease=99.0, holder="h"), 3.0)
    assert kept(shelf, "many", ["0", "1", "2", "4"]) == ["1", "2", "4"]
    shelf.close()


def test_a_full_disk_is_told_as_what_it_is_and_can_be_read(tmp_path: Path) -> None:
    shelf = Store(tmp_path / "s", 99, 1 << 30)
    shelf.put(stored("a"), 0.0)
    full(shelf)
    with pytest.raises(sqlite3.OperationalError, match="full"):
        shelf.put(stored("b", answer=b'{"output": [], "x": "%b"}' % (b"x" * 100_000)), 1.0)
    assert kept(shelf, "k", ["a", "b"]) == ["a"]
    shelf.close()


def full(shelf: Store) -> None:
    """No page more."""
    (pages,) = shelf._db.execute("PRAGMA page_count").fetchone()
    shelf._db.execute(f"PRAGMA max_page_count = {pages}")
