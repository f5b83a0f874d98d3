"""Copies of pages: the right bytes, all of them and no others, whatever the other memory looks like; and what ends one."""

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page_copies import Answers, copied, copy_of, host_pages, written

from meshlm.protocol.edges.kv import PageMemory, Segment
from meshlm.workers.kv import mover
from meshlm.workers.kv.mover import Mover
from meshlm.workers.kv.pages import Column, HostMemory, HostPages, OtherMemory, OtherPages, SharedBytes

NUM_PAGES, PAGE_BYTES = 7, 60


@st.composite
def memories(draw: st.DrawFn) -> tuple[PageMemory, int]:
    """A memory of pages of PAGE_BYTES, its segments in any order of places and with room between; and its file's bytes."""
    cuts = sorted(draw(st.sets(st.integers(1, PAGE_BYTES - 1), max_size=5)))
    lengths = [end - begin for begin, end in zip([0, *cuts], [*cuts, PAGE_BYTES])]
    num_pages, size = draw(st.integers(1, 9)), draw(st.integers(0, 20))
    segments = [Segment(0, 1, 1)] * len(lengths)
    for nth in draw(st.permutations(range(len(lengths)))):
        stride = lengths[nth] + draw(st.integers(0, 9))
        segments[nth] = Segment(size, stride, lengths[nth])
        size += stride * num_pages + draw(st.integers(0, 9))
    return PageMemory("", num_pages, tuple(segments)), size


def page_in(content: bytes, memory: PageMemory, page: int) -> bytes:
    """The oracle: a page is its segments, one behind the other."""
    begins = [segment.offset + page * segment.stride for segment in memory.segments]
    return b"".join(content[at : at + each.length] for at, each in zip(begins, memory.segments))


@settings(max_examples=150, deadline=None)
@given(memories(), st.data())
def test_pages_are_their_bytes_in_any_segments(made: tuple[PageMemory, int], data: st.DataObject) -> None:
    memory, size = made
    widths = data.draw(st.sampled_from([(PAGE_BYTES,), (1, 59), (20, 20, 20), (7, 13, 40)]))
    count = data.draw(st.integers(0, min(NUM_PAGES, memory.num_pages)))
    here = data.draw(st.permutations(range(NUM_PAGES)))[:count]
    there = data.draw(st.permutations(range(memory.num_pages)))[:count]
    is_load = data.draw(st.booleans())
    pages, own = host_pages(NUM_PAGES, widths)
    before = np.random.default_rng(1).integers(0, 256, size, np.uint8).tobytes()
    old = [own(page) for page in range(NUM_PAGES)]
    shared = SharedBytes(size)
    shared.array[:] = np.frombuffer(before, np.uint8)
    there_is = PageMemory(shared.path, memory.num_pages, memory.segments)
    answer = copied(pages, copy_of(there_is, here, there, is_load=is_load))
    assert (answer.num_pages, answer.message) == (count, "")
    after = shared.array.tobytes()
    if is_load:
        assert after == before
        expected = dict(zip(here, (page_in(before, memory, page) for page in there)))
        assert [own(page) for page in range(NUM_PAGES)] == [expected.get(nth, old[nth]) for nth in range(NUM_PAGES)]
        return
    assert [own(page) for page in range(NUM_PAGES)] == old
    for mine, page in zip(here, there):
        assert page_in(after, memory, page) == old[mine]
    touched = np.zeros(size, np.bool_)
    for page in there:
        for segment in memory.segments:
            touched[segment.offset + page * segment.stride :][: segment.length] = True
    unequal = np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8)
    assert not (unequal & ~touched).any(), "a byte outside of the pages was written"


WHOLE = (Segment(0, PAGE_BYTES, PAGE_BYTES),)
WRONG = {
    "an end behind the file": PageMemory("", 5, (Segment(1, PAGE_BYTES, PAGE_BYTES),)),
    "a page too many": PageMemory("", 6, WHOLE),
    "a negative offset": PageMemory("", 2, (Segment(-60, PAGE_BYTES, PAGE_BYTES),)),
    "pages on one another": PageMemory("", 5, (Segment(0, 59, PAGE_BYTES),)),
    "a far offset": PageMemory("", 1, (Segment(1 << 70, PAGE_BYTES, PAGE_BYTES),)),
    "no pages": PageMemory("", 0, WHOLE),
}


@pytest.mark.parametrize("memory", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("is_load", [True, False])
def test_what_is_not_within_the_file_is_refused(memory: PageMemory, is_load: bool, tmp_path: Path) -> None:
    path = written(tmp_path / "pages", 5 * PAGE_BYTES)
    pages, own = host_pages(NUM_PAGES, (PAGE_BYTES,))
    before = [own(page) for page in range(NUM_PAGES)]
    answer = copied(pages, copy_of(PageMemory(path, memory.num_pages, memory.segments), [0], [0], is_load=is_load))
    assert answer.num_pages == 0
    assert f"{path}: " in answer.message and "are not within its 300 bytes" in answer.message  # noqa: PT018
    assert [own(page) for page in range(NUM_PAGES)] == before
    assert Path(path).read_bytes() == bytes(5 * PAGE_BYTES)


def test_numbers_and_sizes_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "pages", 5 * PAGE_BYTES)
    memory = PageMemory(path, 5, WHOLE)
    pages, _ = host_pages(NUM_PAGES, (PAGE_BYTES,))
    messages = {
        "page 7 here: there are 7": copy_of(memory, [1, 7], [0, 1]),
        "page -1 here: there are 7": copy_of(memory, [-1], [0]),
        "page 5 there: there are 5": copy_of(memory, [0, 1], [5, 0]),
        "1 pages here, and 2 there": copy_of(memory, [0], [0, 1]),
        "a page has 60 bytes here, and 20 there": copy_of(PageMemory(path, 5, (Segment(0, 20, 20),)), [0], [0]),
        f"{tmp_path / 'nowhere'}: No such file or directory": copy_of(
            PageMemory(str(tmp_path / "nowhere"), 5, WHOLE), [0], [0]
        ),
        f"{tmp_path}: Is a directory": copy_of(PageMemory(str(tmp_path), 5, WHOLE), [0], [0], is_load=False),
        "/dev/null: no file that can be mapped": copy_of(PageMemory("/dev/null", 5, WHOLE), [0], [0]),
    }
    for message, copy in messages.items():
        assert copied(pages, copy) == (0, 0, message)
    empty = written(tmp_path / "empty", 0)
    assert copied(pages, copy_of(PageMemory(empty, 5, WHOLE), [0], [0])).message == f"{empty}: an empty file"
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    message = copied(pages, copy_of(PageMemory(str(fifo), 5, WHOLE), [0], [0])).message
    assert message == f"{fifo}: no file that can be mapped"


class Slow:
    """Pages of which each is copied once it is let."""

    def __init__(self, pages: HostPages) -> None:
        self._pages = pages
        self.num_pages, self.page_bytes = pages.num_pages, pages.page_bytes
        self.memory: PageMemory | None = None
        self.pins = False
        self.open: Callable[[PageMemory, mmap.mmap], OtherMemory] = pages.open
        self.begun, self.let = threading.Semaphore(0), threading.Semaphore(0)
        self.num_copied = 0

    def mark(self) -> None:
        """Steps are done."""

    def copy(
        self, other: OtherPages, places: Iterable[tuple[int, int]], *, is_load: bool, after: object = None
    ) -> None:
        def slowly() -> Iterator[tuple[int, int]]:
            for place in places:
                self.begun.release()
                assert self.let.acquire(timeout=30)
                yield place
                self.num_copied += 1

        self._pages.copy(other, slowly(), is_load=is_load)


def slow() -> tuple[Slow, Mover, Answers]:
    pages, _ = host_pages(NUM_PAGES, (PAGE_BYTES,))
    found = Slow(pages)
    return found, Mover(found, pytest.fail), Answers()


def buffers() -> list[Column]:
    return [np.zeros((NUM_PAGES, PAGE_BYTES), np.uint8)]


def test_a_copy_stops_at_its_deadline() -> None:
    pages, moving, answers = slow()
    deadline_ns = time.monotonic_ns() + 300_000_000
    moving.submit(copy_of(buffers(), [0, 1, 2], [0, 1, 2], deadline_ns=deadline_ns, done=answers))
    pages.begun.acquire(timeout=30)
    pages.let.release()
    pages.begun.acquire(timeout=30)
    while time.monotonic_ns() < deadline_ns:
        time.sleep(0.01)
    pages.let.release()
    answer = answers.get()
    assert (answer.num_pages, answer.message, pages.num_copied) == (2, mover.TOO_LATE, 2)
    moving.submit(copy_of(buffers(), [0], [0], deadline_ns=time.monotonic_ns() - 1, done=answers))
    assert answers.get()[::2] == (0, mover.TOO_LATE)
    moving.close()


def test_nothing_is_copied_once_a_session_has_ended() -> None:
    """A Reset waits for the page that is being copied, and for no other."""
    pages, moving, answers = slow()
    moving.submit(copy_of(buffers(), [0, 1, 2], [0, 1, 2], done=answers))
    moving.submit(copy_of(buffers(), [3, 4], [3, 4], done=answers))
    pages.begun.acquire(timeout=30)
    moving.session = 8
    waited = threading.Event()

    def wait() -> None:
        moving.wait()
        waited.set()

    threading.Thread(target=wait, daemon=True).start()
    assert not waited.wait(0.2), "a Reset is answered while a page is copied"
    pages.let.release()
    assert waited.wait(30)
    assert [answers.get()[::2] for _ in range(2)] == [(1, mover.ENDED), (0, mover.ENDED)]
    assert pages.num_copied == 1
    pages.let.release()
    moving.submit(copy_of(buffers(), [5], [5], session=8, done=answers))
    assert answers.get()[::2] == (1, "")
    moving.close()


def test_a_file_that_becomes_shorter_is_read_no_more(tmp_path: Path) -> None:
    pages, moving, answers = slow()
    path = written(tmp_path / "pages", NUM_PAGES * PAGE_BYTES)
    memory = PageMemory(path, NUM_PAGES, WHOLE)
    moving.submit(copy_of(memory, [0, 1, 2], [4, 5, 6], done=answers))
    pages.begun.acquire(timeout=30)
    pages.let.release()
    pages.begun.acquire(timeout=30)
    os.truncate(path, 0)
    os.truncate(path, NUM_PAGES * PAGE_BYTES - 1)  # what is mapped is still there, in one page of the file
    pages.let.release()
    answer = answers.get()
    assert answer[::2] == (2, "the file has become shorter than 420 bytes")
    moving.submit(copy_of(memory, [0], [0], done=answers))
    assert "are not within its 419 bytes" in answers.get().message
    moving.close()


def test_another_file_at_the_same_path_is_mapped_anew(tmp_path: Path) -> None:
    """As a holder that was started again makes one."""
    pages, own = host_pages(NUM_PAGES, (PAGE_BYTES,))
    moving, answers, path = Mover(pages, pytest.fail), Answers(), tmp_path / "pages"
    for content in (b"a", b"b"):
        new = tmp_path / "new"
        new.write_bytes(content * PAGE_BYTES)
        new.replace(path)
        moving.submit(copy_of(PageMemory(str(path), 1, WHOLE), [2], [0], done=answers))
        assert answers.get().num_pages == 1
        assert own(2) == content * PAGE_BYTES
    moving.close()


def test_a_mapping_is_given_up_once_its_process_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is not kept for ever; that of others is."""
    monkeypatch.setattr(mover, "LOOK_S", 0.05)
    pages, _ = host_pages(NUM_PAGES, (PAGE_BYTES,))
    moving, answers = Mover(pages, pytest.fail), Answers()
    paths = [written(tmp_path / name, PAGE_BYTES) for name in ("stays", "goes", "other")]
    for path in paths:
        moving.submit(copy_of(PageMemory(path, 1, WHOLE), [0], [0], done=answers))
        answers.get()
    os.unlink(paths[1])
    os.replace(written(tmp_path / "new", PAGE_BYTES), paths[2])
    limit = time.monotonic() + 30
    while len(moving._mappings) > 1:
        assert time.monotonic() < limit
        time.sleep(0.02)
    mapped = Path("/proc/self/maps").read_text("ascii")
    assert [path in mapped for path in paths] == [True, False, False]
    moving.close()


def test_memory_of_a_gpu_is_refused_by_the_host(tmp_path: Path) -> None:
    pages, _ = host_pages(NUM_PAGES, (PAGE_BYTES,))
    path = written(tmp_path / "pages", PAGE_BYTES)
    answer = copied(pages, copy_of(PageMemory(path, 1, WHOLE, b"handle"), [0], [0]))
    assert answer == (0, 0, f"{path}: memory of a GPU, which the host cannot read")


def test_nobody_can_make_shared_memory_shorter() -> None:
    shared = SharedBytes(1000)
    with open(shared.path, "rb+") as file:  # as another process would
        with pytest.raises(PermissionError):
            os.ftruncate(file.fileno(), 10)
        file.write(b"there")
    assert shared.array[:5].tobytes() == b"there"
    path = shared.path
    del shared
    assert not os.path.exists(path)


def test_a_mover_that_dies_ends_the_process() -> None:
    class Broken(HostPages):
        def copy(self, *arguments: object, **options: object) -> None:
            raise RuntimeError("no bytes\nat all")

    said = Answers()
    moving = Mover(Broken([np.zeros((2, PAGE_BYTES), np.uint8)]), said.put)
    moving.submit(copy_of([np.zeros((2, PAGE_BYTES), np.uint8)], [0], [0], session=0))
    assert said.get() == "the mover died: RuntimeError: no bytes"


@pytest.mark.parametrize("is_load", [True, False])
def test_loads_and_saves_are_made_side_by_side(is_load: bool) -> None:
    """A copy one way waits for none the other way; those of one way are made in order."""
    pages, _ = host_pages(NUM_PAGES, (PAGE_BYTES,))
    columns = buffers()
    one, go_on, begun, order = Mover(pages, pytest.fail), threading.Event(), Answers(), Answers()

    def first(copied: object) -> None:
        begun(copied)
        assert go_on.wait(30)

    one.submit(copy_of(columns, [0], [0], is_load=is_load, done=first))
    begun.get()
    for nth in range(1, 4):
        for other_way in (True, False):

            def done(copied: object, name: tuple[bool, int] = (other_way, nth)) -> None:
                order(name)

            one.submit(copy_of(columns, [nth], [nth + 3], is_load=is_load ^ other_way, done=done))
    assert [order.get() for _ in range(3)] == [(True, 1), (True, 2), (True, 3)]
    go_on.set()
    assert [order.get() for _ in range(3)] == [(False, 1), (False, 2), (False, 3)]
    one.close()


def test_a_reset_waits_for_both_ways() -> None:
    pages, moving, answers = slow()
    for is_load in (True, False):
        moving.submit(copy_of(buffers(), [0, 1], [0, 1], is_load=is_load, done=answers))
    for _ in range(2):
        assert pages.begun.acquire(timeout=30)
    moving.session = 8
    waited = threading.Event()

    def wait() -> None:
        moving.wait()
        waited.set()

    threading.Thread(target=wait, daemon=True).start()
    for _ in range(2):
        assert not waited.wait(0.1), "a Reset is answered while a page is copied"
        pages.let.release()
    assert waited.wait(30)
    assert [answers.get()[::2] for _ in range(2)] == [(1, mover.ENDED)] * 2
    moving.close()


def test_memory_of_a_process_that_is_gone_stays_open_while_a_copy_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread gives it up meanwhile; it is closed once, behind the copy."""
    monkeypatch.setattr(mover, "LOOK_S", 0.02)
    pages, moving, answers = slow()
    closed: list[bool] = []
    is_copying = threading.Event()

    class Opened(HostMemory):
        def close(self) -> None:
            closed.append(is_copying.is_set())

    pages.open = lambda memory, file: Opened(file)
    path = written(tmp_path / "pages", NUM_PAGES * PAGE_BYTES)
    is_copying.set()
    moving.submit(copy_of(PageMemory(path, NUM_PAGES, WHOLE), [0], [4], done=answers))
    assert pages.begun.acquire(timeout=30)
    os.unlink(path)
    save = copy_of(buffers(), [], [], is_load=False, done=answers)
    limit = time.monotonic() + 30
    while len(moving._mappings):
        assert time.monotonic() < limit
        moving.submit(save)
        answers.get()
    is_copying.clear()
    pages.let.release()
    assert answers.get()[::2] == (1, "")
    moving.close()
    for thread in moving._threads:
        thread.join(30)
    assert closed == [False]
