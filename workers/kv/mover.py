"""The threads that copy pages of the KV cache from and to other memory, beside the steps: one makes loads, which requests wait for,
and one saves, side by side, as a GPU copies both ways at once. Each kind is in the order in which it is told. What is saved is held
until it is, and what is loaded until it is there, so that no page is of a load and of a save.

The stepper hands it a copy behind the steps that were launched before (moves.py). Of an ended session nothing is copied: `session` is
set in the event loop as soon as a Reset comes, and `wait` returns once the page that was being copied then is done, so that a worker
that answers a Reset writes and reads nothing of the session before.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from meshlm.protocol.edges.kv import PageMemory
from meshlm.workers.kv.mapped import LOOK_S, Mapped, Mappings
from meshlm.workers.kv.pages import BadMemory, Column, HostColumns, KVPages, OtherPages

ENDED = "its session has ended"
TOO_LATE = "the deadline has passed"


class Copied(NamedTuple):
    """The first `num_pages` of a copy are done; `message` says why the others are not."""

    num_pages: int
    duration_ns: int = 0
    message: str = ""


class Copy(NamedTuple):
    """Pages of the KV cache, and their lines of other memory. `done` is called in the mover thread."""

    session: int
    is_load: bool  # into the KV cache; else out of it
    pages: Sequence[int]
    lines: Sequence[int]
    other: PageMemory | Sequence[Column]  # of another process, or of this one
    after: object  # a mark of KVPages
    deadline_ns: int  # monotonic; 0: none
    done: Callable[[Copied], None]


class Mover:
    """`fatal` is called with a line should a thread end by an error, which is a bug."""

    def __init__(self, pages: KVPages, fatal: Callable[[str], None]) -> None:
        self.session = 0
        self._pages, self._fatal = pages, fatal
        self._mappings = Mappings(pages)
        self._loads, self._saves = _Queue(), _Queue()
        self._threads = [
            threading.Thread(target=self._work, args=(copies,), name=f"mover of {kind}", daemon=True)
            for copies, kind in ((self._loads, "loads"), (self._saves, "saves"))
        ]
        self._ending = threading.Barrier(len(self._threads), self._mappings.close)
        for thread in self._threads:
            thread.start()

    def submit(self, copy: Copy) -> None:
        """From any thread. `done` is called once it is over, whatever becomes of it."""
        (self._loads if copy.is_load else self._saves).copies.put(copy)

    def wait(self) -> None:
        """Until nothing of an earlier session is copied any more."""
        for copies in (self._loads, self._saves):
            with copies.copying:
                pass

    def close(self) -> None:
        """Behind what was submitted before."""
        for copies in (self._loads, self._saves):
            copies.copies.put(None)

    # --- mover threads ---

    def _work(self, copies: "_Queue") -> None:
        try:
            while (copy := self._next(copies)) is not None:
                with copies.copying:
                    copied = self._do(copy)
                copy.done(copied)
            self._ending.wait()
        except BaseException as error:  # without these threads no page moves, and loads wait until their limits
            self._fatal(f"the mover died: {type(error).__name__}: {error}".splitlines()[0])

    def _next(self, copies: "_Queue") -> Copy | None:
        while True:
            if time.monotonic() >= copies.look_at:
                self._mappings.close_those_gone()
                copies.look_at = time.monotonic() + LOOK_S
            with suppress(queue.Empty):
                return copies.copies.get(timeout=LOOK_S if len(self._mappings) else None)

    def _do(self, copy: Copy) -> Copied:
        begin_ns = time.monotonic_ns()
        try:
            with self._other(copy) as (mapped, other):
                self._check(copy, other)
                places = _Places(copy, mapped, lambda: copy.session == self.session)
                self._pages.copy(other, places, is_load=copy.is_load, after=copy.after)
        except BadMemory as error:
            return Copied(0, 0, str(error))
        return Copied(places.num_given, time.monotonic_ns() - begin_ns, places.message)

    @contextmanager
    def _other(self, copy: Copy) -> Iterator[tuple[Mapped | None, OtherPages]]:
        """The memory on the other side. BadMemory."""
        if not isinstance(copy.other, PageMemory):
            yield None, HostColumns(copy.other)
            return
        with self._mappings.use(copy.other, writes=not copy.is_load) as mapped:
            yield mapped, mapped.opened.pages(copy.other)

    def _check(self, copy: Copy, other: OtherPages) -> None:
        """BadMemory for what does not fit, before anything is read or written."""
        own = self._pages
        if other.page_bytes != own.page_bytes:
            raise BadMemory(f"a page has {own.page_bytes} bytes here, and {other.page_bytes} there")
        if len(copy.pages) != len(copy.lines):
            raise BadMemory(f"{len(copy.pages)} pages here, and {len(copy.lines)} there")
        for side, numbers, count in (("here", copy.pages, own.num_pages), ("there", copy.lines, other.num_pages)):
            if numbers and not 0 <= min(numbers) <= max(numbers) < count:
                wrong = min(numbers) if min(numbers) < 0 else max(numbers)
                raise BadMemory(f"page {wrong} {side}: there are {count}")


class _Queue:
    """The copies of one thread."""

    def __init__(self) -> None:
        self.copies: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()  # None: the end
        self.copying = threading.Lock()
        self.look_at = 0.0  # when processes are looked at again whose memory is open


class _Places:
    """The places of a copy, one by one, until it has to stop: `message` says why it did."""

    def __init__(self, copy: Copy, mapped: Mapped | None, is_wanted: Callable[[], bool]) -> None:
        self._copy, self._mapped, self._is_wanted = copy, mapped, is_wanted
        self.num_given, self.message = 0, ""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for place in zip(self._copy.pages, self._copy.lines, strict=True):
            if not self._is_wanted():
                self.message = ENDED
            elif self._copy.deadline_ns and time.monotonic_ns() >= self._copy.deadline_ns:
                self.message = TOO_LATE
            elif self._mapped is not None and not self._mapped.is_whole():
                self.message = f"the file has become shorter than {len(self._mapped.file)} bytes"
            if self.message:
                return
            self.num_given += 1
            yield place
