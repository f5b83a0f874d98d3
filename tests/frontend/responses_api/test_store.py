"""The file that keeps responses."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshlm.frontend.responses_api import store
from meshlm.frontend.responses_api.records import Chunk, Stored, Written
from meshlm.frontend.responses_api.store import Store

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
