"""The pages of KV tensors on a GPU.

A page of the host is one run of bytes, which the GPU copies from and to by itself; a page on the GPU is a piece of each KV tensor. So
pages are gathered into lines of a buffer on the GPU by one kernel (kernels/copy_pages) and copied from there, and the other way round:
a copy for each piece would take several times as long. Lanes take turns: while one's lines are on their way, the other's are gathered.
Loads and saves have their own lanes, as each has a thread, and the GPU copies both ways at once. Pages of a peer are copied by the
kernel alone.

All of it is beside the steps: in streams of its own, a load behind the steps that its mark names, and nothing is allocated, so that
graphs may be captured meanwhile. A new thread has no GPU: `driver.use` gives it this engine's.
"""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshlm.kernels.copy_pages.kernel import Columns, columns_at, copy_pages
from meshlm.protocol.edges.kv import PageMemory
from meshlm.workers.cuda import driver
from meshlm.workers.kv.pages import HostColumns, OtherMemory, OtherPages
from meshlm.workers.kv.peer_memory import Exported, PeerColumns, PeerMemory
from meshlm.workers.kv.pinned import PinnedColumns, PinnedMemory, Run

LANES = 2  # of loads, and as many of saves
LANE_BYTES = 16 << 20  # of lines that are on their way together: the GPU's cache holds them
AT_ONCE = 128  # pages that one kernel copies, at most
Places = Sequence[tuple[int, int]]  # a page here, and its line there


class Lane:
    """A stream with a buffer of lines, [num_lines, page_bytes]."""

    def __init__(self, device: torch.device, num_lines: int, page_bytes: int) -> None:
        make_event: Any = torch.cuda.Event  # typed in some versions of torch only
        make_stream: Any = torch.cuda.Stream
        self.stream = make_stream(device)
        self.lines = torch.empty(num_lines, page_bytes, dtype=torch.uint8, device=device)
        self._pinned = torch.empty(2, AT_ONCE, dtype=torch.int32, pin_memory=True)
        self._host: Any = self._pinned.numpy()
        self._there = torch.empty(2, AT_ONCE, dtype=torch.int32, device=device)
        self._done = make_event(blocking=True)

    def wait(self) -> None:
        """Until all that it was given is done."""
        self._done.synchronize()

    def mark(self) -> None:
        """Behind what it was given."""
        self._done.record(self.stream)

    def numbers(self, places: Places) -> tuple[Tensor, Tensor]:
        """The pages here, and the lines there: int32 [AT_ONCE] on the GPU. The lane waits for nothing any more."""
        self._host[:, : len(places)] = np.array(places, np.int32).T
        num_bytes, stream = 4 * self._there.numel(), self.stream.cuda_stream
        driver.to_device(self._there.data_ptr(), self._pinned.data_ptr(), num_bytes, stream, is_pinned=True)
        return self._there[0], self._there[1]


class Piece(NamedTuple):
    """A run of bytes of the host, and the address of its bytes among a lane's lines."""

    host: Run
    line: int


class Lanes:
    """The lanes of one direction, which its thread alone uses; and where this engine's columns are, as the GPU is told in them."""

    def __init__(self, columns: Sequence[Tensor], num_lines: int) -> None:
        self._columns, device, width = columns, columns[0].device, columns[0].shape[1]
        page_bytes = len(columns) * width
        self.lanes = [Lane(device, num_lines, page_bytes) for _ in range(LANES)]
        self.lines: list[Columns] = []  # lines of each lane, as columns
        for lane in self.lanes:
            begin = lane.lines.data_ptr()
            self.lines.append(columns_at([begin + nth * width for nth in range(len(columns))], page_bytes, device))
        self._addresses: list[int] = []
        self.own: Columns = self.lines[0]

    def look_up(self) -> None:
        """Where the tensors are now: a sleep moves them. Nothing is on its way in a lane."""
        addresses = [column.data_ptr() for column in self._columns]
        if addresses != self._addresses:
            with torch.cuda.stream(self.lanes[0].stream):
                self.own = columns_at(addresses, self._columns[0].stride(0), self._columns[0].device)
                self._addresses = addresses
                self.lanes[0].mark()
            self.lanes[0].wait()  # the other lane's kernels read it, too


class DevicePages:
    """columns: uint8 [pages, bytes] each, alike. shared: other ranks may read them; they are of one allocation then."""

    pins = True

    def __init__(self, columns: Sequence[Tensor], *, shared: bool = False) -> None:
        self.columns, self._device, self._width = columns, columns[0].device, columns[0].shape[1]
        self.num_pages, self.page_bytes = len(columns[0]), len(columns) * self._width
        self._num_lines = max(1, min(AT_ONCE, LANE_BYTES // self.page_bytes))
        self._loads, self._saves = (Lanes(columns, self._num_lines) for _ in range(2))
        self._nth = torch.arange(self._num_lines, dtype=torch.int32, device=self._device)
        driver.use(self._device.index)
        self._exported = Exported(columns) if shared else None
        self.memory: PageMemory | None = None if self._exported is None else self._exported.memory
        torch.cuda.synchronize(self._device)
        self._warm_up()

    def _warm_up(self) -> None:
        """Has the kernel compiled and loaded: copies a page out and in again, as it is."""
        for one in (self._loads, self._saves):
            one.look_up()
            for lane, lines in zip(one.lanes, one.lines, strict=True):
                with torch.cuda.stream(lane.stream):
                    copy_pages(one.own, self._nth, lines, self._nth, 1, self._width)
                    copy_pages(lines, self._nth, one.own, self._nth, 1, self._width)
                    lane.mark()
                lane.wait()

    def mark(self) -> object:
        """As KVPages has it."""
        make: Any = torch.cuda.Event
        event = make()
        event.record()
        return event

    def open(self, memory: PageMemory, file: mmap.mmap) -> OtherMemory:
        """As KVPages has it."""
        driver.use(self._device.index)
        if not memory.handle:
            return PinnedMemory(file, self._device.index)
        return PeerMemory(memory, self._width, self._device, self._loads.lanes[0].stream)

    def copy(
        self, other: OtherPages, places: Iterable[tuple[int, int]], *, is_load: bool, after: object = None
    ) -> None:
        """As KVPages has it."""
        driver.use(self._device.index)
        asked, nth, one = iter(places), 0, self._loads if is_load else self._saves
        while some := list(islice(asked, AT_ONCE if isinstance(other, PeerColumns) else self._num_lines)):
            if not nth:
                one.look_up()
            lane, lines = one.lanes[nth % LANES], one.lines[nth % LANES]
            nth += 1
            lane.wait()
            with torch.cuda.stream(lane.stream):
                if isinstance(other, PeerColumns):
                    self._between(lane, one.own, other, some, is_load, after)
                elif is_load:
                    self._load(lane, lines, other, some, after)
                else:
                    self._save(lane, lines, other, some, after)
                lane.mark()
        for lane in one.lanes:
            lane.wait()

    def _between(
        self, lane: Lane, columns: Columns, other: PeerColumns, places: Places, is_load: bool, after: object
    ) -> None:
        here, there = lane.numbers(places)
        own, others = (columns, here), (other.columns, there)
        _wait_for(lane, after)
        copy_pages(*(others if is_load else own), *(own if is_load else others), len(places), self._width)

    def _load(self, lane: Lane, lines: Columns, other: OtherPages, places: Places, after: object) -> None:
        here, _ = lane.numbers(places)
        for (address, num_bytes, is_pinned), line in self._pieces(lane, other, places):
            driver.to_device(line, address, num_bytes, lane.stream.cuda_stream, is_pinned=is_pinned)
        _wait_for(lane, after)
        copy_pages(lines, self._nth, self._loads.own, here, len(places), self._width)

    def _save(self, lane: Lane, lines: Columns, other: OtherPages, places: Places, after: object) -> None:
        here, _ = lane.numbers(places)
        _wait_for(lane, after)
        copy_pages(self._saves.own, here, lines, self._nth, len(places), self._width)
        for (address, num_bytes, is_pinned), line in self._pieces(lane, other, places):
            driver.to_host(address, line, num_bytes, lane.stream.cuda_stream, is_pinned=is_pinned)

    def _pieces(self, lane: Lane, other: OtherPages, places: Places) -> Iterator[Piece]:
        """What lies behind one another on both sides is one piece."""
        assert isinstance(other, HostColumns), "no memory of another kind is opened here"
        at = lane.lines.data_ptr()
        for column in other.columns:
            stride, width = column.strides[0], column.shape[1]
            for begin, count in _runs(places) if stride == width == self.page_bytes else _single(places):
                address, line = column.ctypes.data + places[begin][1] * stride, at + begin * self.page_bytes
                whole = Run(address, count * width, is_pinned=False)
                for run in other.memory.runs(*whole[:2]) if isinstance(other, PinnedColumns) else (whole,):
                    yield Piece(run, line + run.address - address)
            at += width


def _wait_for(lane: Lane, after: object) -> None:
    """What follows in the lane is behind this mark of steps."""
    if after is not None:
        lane.stream.wait_event(after)


def _single(places: Places) -> Iterator[tuple[int, int]]:
    return ((nth, 1) for nth in range(len(places)))


def _runs(places: Places) -> Iterator[tuple[int, int]]:
    """Runs of lines with consecutive numbers: the first's place, and how many."""
    begin = 0
    for nth in range(1, len(places) + 1):
        if nth == len(places) or places[nth][1] != places[nth - 1][1] + 1:
            yield begin, nth - begin
            begin = nth
