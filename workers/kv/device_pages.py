"""The pages of an engine's KV tensors, on the host or on a device.

On a device a stream of its own copies between the tensors and pinned memory, behind the steps that came before, and the host between
that and the other memory: a page is copied there while the next ones are on their way. Written for any device of torch that has
streams.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshlm.protocol.edges.kv import PageMemory
from meshlm.workers.kv.pages import Column, HostPages, KVPages, SharedBytes, cut

SLOTS = 8  # pages that are on their way at once


class OnItsWay(NamedTuple):
    """A page of a copy out of the device: its place in pinned memory, and its line of the other memory."""

    slot: int
    line: int
    done: torch.Event


class DevicePages:
    """Pages of tensors on a device. columns: uint8 [pages, bytes] each."""

    memory: PageMemory | None = None

    def __init__(self, columns: Sequence[Tensor]) -> None:
        self._columns = columns
        self.num_pages = len(columns[0])
        self.page_bytes = sum(column.shape[1] for column in columns)
        self._device = columns[0].device
        self._stream = torch.Stream(self._device)
        self._pinned = torch.empty(SLOTS, self.page_bytes, dtype=torch.uint8, pin_memory=True)
        self._host: list[Column] = [self._pinned.numpy()]
        widths = [column.shape[1] for column in columns]
        self._slots = self._pinned.split(widths, 1)  # a view for each column

    def mark(self) -> torch.Event:
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def copy(
        self, columns: Sequence[Column], places: Iterable[tuple[int, int]], *, is_load: bool, after: object = None
    ) -> None:
        if isinstance(after, torch.Event):
            self._stream.wait_event(after)
        pieces = cut(self._host, columns)
        with torch.inference_mode(), self._stream:
            if is_load:
                self._load(pieces, places)
            else:
                self._save(pieces, places)

    def _load(self, pieces: list[tuple[Column, Column]], places: Iterable[tuple[int, int]]) -> None:
        used: list[torch.Event | None] = [None] * SLOTS
        for nth, (here, line) in enumerate(places):
            slot = nth % SLOTS
            if (event := used[slot]) is not None:
                event.synchronize()
            for own, other in pieces:
                own[slot] = other[line]
            for column, pinned in zip(self._columns, self._slots, strict=True):
                column[here].copy_(pinned[slot], non_blocking=True)
            used[slot] = self._recorded()
        self._stream.synchronize()

    def _save(self, pieces: list[tuple[Column, Column]], places: Iterable[tuple[int, int]]) -> None:
        under_way: deque[OnItsWay] = deque()

        def finish() -> None:
            page = under_way.popleft()
            page.done.synchronize()
            for own, other in pieces:
                other[page.line] = own[page.slot]

        for nth, (here, line) in enumerate(places):
            if len(under_way) == SLOTS:
                finish()
            for column, pinned in zip(self._columns, self._slots, strict=True):
                pinned[nth % SLOTS].copy_(column[here], non_blocking=True)
            under_way.append(OnItsWay(nth % SLOTS, line, self._recorded()))
        while under_way:
            finish()

    def _recorded(self) -> torch.Event:
        event = torch.Event(self._device)
        event.record(self._stream)
        return event


def pages_of(tensors: Sequence[Tensor], num_pages: int, shared: SharedBytes | None) -> KVPages:
    """The first pages of these KV tensors, uint8 [halves, pages, bytes]; those behind them hold states of drafts, which stay here."""
    halves = [half[:num_pages] for tensor in tensors for half in tensor]
    if halves[0].device.type != "cpu":
        return DevicePages(halves)
    columns: list[Column] = [np.asarray(half.numpy()) for half in halves]
    return HostPages(columns, None if shared is None else shared.memory(columns))
