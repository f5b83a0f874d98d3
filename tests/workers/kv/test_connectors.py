"""Connectors of plug-ins: what they find, load and save, and that one which raises, hangs or lies fails that message alone."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_copies import Answers, host_pages

from meshlm.protocol.edges.kv import NOT_HERE, FindPages, MovePages, PagesFound, PagesMoved
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.workers.kv import connector_thread
from meshlm.workers.kv.connector_thread import ConnectorCalls, ConnectorFailed, ConnectorThread
from meshlm.workers.kv.connectors import Page
from meshlm.workers.kv.mover import ENDED, Mover

WIDTHS, NUM_PAGES = (5, 11), 12
PAGE_BYTES = sum(WIDTHS)
A, B, C = (bytes([letter]) * 32 for letter in b"abc")


class Kept:
    """Keeps pages in memory; a key's in order. `wrong` is called before each method."""

    def __init__(self) -> None:
        self.pages: dict[bytes, list[bytes]] = {}
        self.calls: list[tuple[str, int]] = []
        self.params: Mapping[str, Any] = {}
        self.threads: set[int] = set()
        self.wrong: Callable[[], object] = lambda: None
        self.num_closed = 0

    def _begin(self, method: str, count: int) -> None:
        self.calls.append((method, count))
        self.threads.add(threading.get_ident())
        self.wrong()

    def find(self, keys: Sequence[bytes], params: Mapping[str, Any]) -> Sequence[bool]:
        self._begin("find", len(keys))
        self.params = params
        return [key in self.pages for key in keys]

    def load(self, keys: Sequence[bytes], pages: Sequence[Page], params: Mapping[str, Any]) -> Sequence[bool]:
        self._begin("load", len(keys))
        filled, nth = [], {key: iter(self.pages.get(key, ())) for key in keys}
        for key, page in zip(keys, pages, strict=True):
            content = next(nth[key], None)
            if content is not None:
                page[:] = np.frombuffer(content, np.uint8)
            filled.append(content is not None)
        return filled

    def save(self, keys: Sequence[bytes], pages: Sequence[Page]) -> None:
        self._begin("save", len(keys))
        for key in keys:
            self.pages[key] = []
        for key, page in zip(keys, pages, strict=True):
            self.pages[key].append(page.tobytes())

    def close(self) -> None:
        self.num_closed += 1


class Desk:
    """One connector's threads, with pages of numbers by chance."""

    def __init__(self, kept: Kept, limit_s: float = 30.0) -> None:
        self.kept = kept
        self.pages, self.page = host_pages(NUM_PAGES, WIDTHS)
        self.mover, self.said = Mover(self.pages, pytest.fail), Answers()
        self.thread = ConnectorThread(ConnectorCalls("kept", lambda: kept, limit_s), self.mover, PAGE_BYTES, self.said)

    def close(self) -> None:
        self.thread.close()
        self.mover.close()

    def ask(self, message: FindPages | MovePages) -> Any:
        self.thread.submit(message)
        return self.said.get()

    def find(self, *keys: bytes, widths: bytes = b"", params: bytes = b"") -> list[int]:
        widths = widths or b"\x01" * len(keys)
        found: PagesFound = self.ask(FindPages(3, b"", b"".join(keys), widths, connector="kept", params=params))
        assert found.number == 3
        return ints(found.pages)

    def move(self, keys: Sequence[bytes], pages: Sequence[int], *, is_load: bool, deadline_ns: int = 0) -> PagesMoved:
        column = pack_i32(pages)
        moved: PagesMoved = self.ask(
            MovePages(0, 4, is_load, column, connector="kept", keys=b"".join(keys), deadline_ns=deadline_ns)
        )
        assert (moved.session, moved.number) == (0, 4)
        return moved


@pytest.fixture
def desk() -> Iterator[Desk]:
    made = Desk(Kept())
    yield made
    made.close()


def test_a_load_ends_once_behind_all_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another mesh keeps for it is not let go while it still reads; a load that failed leaves it to the lease."""
    monkeypatch.setattr(connector_thread, "BATCH_BYTES", 2 * PAGE_BYTES)
    kept, desk = Kept(), Desk(Kept())
    kept.pages = {A: [bytes(PAGE_BYTES)], B: [bytes(PAGE_BYTES)], C: [bytes(PAGE_BYTES)]}

    def end(connector: Kept, params: Mapping[str, Any]) -> None:
        connector.calls.append(("end", len(params)))

    calls = ConnectorCalls("kept", lambda: kept, 30.0)
    desk.thread = ConnectorThread(calls, desk.mover, PAGE_BYTES, desk.said, end)
    assert not desk.move([A, B, C], [4, 2, 7], is_load=True).failed
    assert desk.move([A, b"d" * 32], [4, 2], is_load=True).failed
    desk.find(A)
    assert kept.calls == [("load", 2), ("load", 1), ("end", 0), ("load", 2), ("find", 1)]
    desk.close()


def test_what_was_saved_is_found_and_loaded(desk: Desk) -> None:
    before = [desk.page(nth) for nth in range(NUM_PAGES)]
    saved = desk.move([A, A, B], [4, 2, 7], is_load=False)
    assert (saved.failed, saved.message, saved.num_bytes) == (b"", "", 3 * PAGE_BYTES)
    assert saved.duration_ns > 0
    assert desk.kept.pages == {A: [before[4], before[2]], B: [before[7]]}
    assert desk.find(A, C, B, widths=b"\x02\x02\x01", params=b'{"ticket": 5}') == [0, 0, NOT_HERE, NOT_HERE, 0]
    assert desk.kept.params == {"ticket": 5}
    assert desk.find(C) == []
    loaded = desk.move([B, A, A], [0, 9, 1], is_load=True)
    assert (loaded.failed, loaded.message, loaded.num_bytes) == (b"", "", 3 * PAGE_BYTES)
    assert [desk.page(nth) for nth in (0, 9, 1)] == [before[7], before[4], before[2]]
    assert [desk.page(nth) for nth in (2, 3, 4, 5, 6, 7, 8)] == before[2:9]
    assert len(desk.kept.threads) == 1, "all calls are made in one thread"


def test_pages_that_a_connector_does_not_fill_have_failed(desk: Desk) -> None:
    before = [desk.page(nth) for nth in range(NUM_PAGES)]
    desk.move([A], [3], is_load=False)
    moved = desk.move([A, A, C, A], [5, 6, 7, 8], is_load=True)  # one page is there of A
    assert ints(moved.failed) == [1, 2, 3]
    assert moved.message == "connector kept: 3 pages are not there"
    assert moved.num_bytes == PAGE_BYTES
    assert [desk.page(nth) for nth in (5, 6, 7, 8)] == [before[3], *before[6:9]]


def failing(error: BaseException) -> Callable[[], object]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [OSError("disk\ngone"), SystemExit("out"), TimeoutError(), MemoryError("none")])
def test_what_a_connector_raises_is_told_by_name(desk: Desk, error: BaseException) -> None:
    before = [desk.page(nth) for nth in range(NUM_PAGES)]
    desk.move([A], [3], is_load=False)
    desk.kept.wrong = failing(error)
    text = f"connector kept: {type(error).__name__}"
    assert desk.find(A) == []
    for is_load in (True, False):
        moved = desk.move([A, B], [5, 6], is_load=is_load)
        assert ints(moved.failed) == [0, 1]
        assert moved.message.startswith(text)
        assert "\n" not in moved.message
        assert moved.num_bytes == 0
    assert [desk.page(nth) for nth in range(NUM_PAGES)] == before
    desk.kept.wrong = lambda: None
    assert desk.find(A) == [0], "it goes on"


def test_a_connector_that_hangs_fails_its_calls_alone() -> None:
    desk, let = Desk(Kept(), 0.2), threading.Event()
    before = desk.page(5)
    desk.move([A], [3], is_load=False)
    desk.kept.wrong = lambda: let.wait(30)
    moved = desk.move([A], [5], is_load=True)
    assert moved.message == "connector kept: a call has not returned within 0.2 s"
    begin = time.monotonic()
    moved = desk.move([A], [5], is_load=True)
    assert moved.message == "connector kept: an earlier call has not returned"
    assert time.monotonic() - begin < 0.2
    desk.kept.wrong = lambda: None
    let.set()
    limit = time.monotonic() + 30
    while desk.find(A) == []:
        assert time.monotonic() < limit
    assert desk.page(5) == before, "what came too late goes nowhere"
    assert desk.move([A], [5], is_load=True).failed == b""
    assert desk.page(5) == desk.page(3)
    desk.close()


def test_a_call_ends_at_the_deadline_of_its_move() -> None:
    desk, let = Desk(Kept()), threading.Event()
    desk.kept.wrong = lambda: let.wait(30)
    moved = desk.move([A], [5], is_load=True, deadline_ns=time.monotonic_ns() + 200_000_000)
    assert "a call has not returned within 0." in moved.message
    let.set()
    desk.close()


def test_answers_of_another_length_are_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.move([A, B], [3, 4], is_load=False)
    monkeypatch.setattr(desk.kept, "find", lambda keys, params: [True])
    assert desk.find(A, B) == []
    monkeypatch.setattr(desk.kept, "load", lambda keys, pages, params: [True] * 3)
    moved = desk.move([A, B], [5, 6], is_load=True)
    assert moved.message == "connector kept: load answers 3 times, and 2 were asked"
    assert ints(moved.failed) == [0, 1]
    moved = desk.move([A], [5, 6], is_load=True)
    assert (ints(moved.failed), moved.message) == ([0, 1], "1 keys of 2 pages")


def test_what_is_loaded_for_a_session_that_ended_is_not_copied(desk: Desk) -> None:
    before = desk.page(5)
    desk.move([A], [3], is_load=False)
    desk.kept.wrong = lambda: setattr(desk.mover, "session", 9)
    assert desk.move([A], [5], is_load=True).message == ENDED
    assert desk.page(5) == before
    desk.thread.submit(MovePages(0, 4, True, pack_i32([5]), connector="kept", keys=A))
    desk.kept.wrong = lambda: None
    desk.thread.submit(FindPages(8, b"", A, b"\x01", session=9))
    assert desk.said.get() == PagesFound(8, pack_i32([0]), session=9), "nobody waits for the answer before"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 5))
def test_batches_are_bounded_and_keep_a_key_together(widths: list[int], most: int, num_there: int) -> None:
    desk = Desk(Kept())
    keys = [bytes([65 + nth]) * 32 for nth, width in enumerate(widths) for _ in range(width)]
    keys = keys[:NUM_PAGES]
    before = [desk.page(nth) for nth in range(NUM_PAGES)]
    pages = list(range(len(keys)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connector_thread, "BATCH_BYTES", most * PAGE_BYTES)
        assert desk.move(keys, pages, is_load=False).failed == b""
        there = sorted(desk.kept.pages)[:num_there]
        desk.kept.pages = {key: desk.kept.pages[key] for key in there}
        moved = desk.move(keys, pages[::-1], is_load=True)
    assert sum(count for method, count in desk.kept.calls if method == "save") == len(keys)
    assert all(count < most + 3 for _, count in desk.kept.calls), "a batch may end a key later"
    assert ints(moved.failed) == [nth for nth, key in enumerate(keys) if key not in there]
    for nth, key in enumerate(keys):
        assert desk.page(pages[::-1][nth]) == before[nth if key in there else pages[::-1][nth]]
    desk.close()


def test_a_connector_that_cannot_be_made_is_told_by_name() -> None:
    def make() -> Kept:
        raise KeyError("folder")

    with pytest.raises(ConnectorFailed, match="connector kept: KeyError: 'folder'"):
        ConnectorCalls("kept", make)


def test_a_connector_is_made_anew_where_pages_come_to_mean_something_else() -> None:
    made: list[Kept] = []

    def make() -> Kept:
        made.append(Kept())
        return made[-1]

    calls = ConnectorCalls("kept", make)
    calls.remake()
    assert not calls.call(lambda connector: made[-1].pages)
    assert [one.num_closed for one in made] == [1, 0]
    calls.close()
