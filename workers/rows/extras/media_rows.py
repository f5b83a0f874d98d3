"""Rows whose prompt has images. A token that is a vector has the id `MEDIA` in the row's tokens.

In the step that computes the first of an item's vectors, the encoder makes all of them; a later step, or another request with the same
image, takes them from the cache, or has them made anew where they had to go. So what a row keeps is where its tensors lie, no more.
A step encodes the items that its own tokens need: the planner's token budget bounds both. What a row cannot have ends its request.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace
from torch import Tensor

from meshlm.protocol.config import Resolved
from meshlm.protocol.edges.step import NewRow, RowFailed
from meshlm.protocol.extras import find_extra
from meshlm.protocol.media import Media, MediaItem
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.workers.batch import MEDIA, UncutRun
from meshlm.workers.media.positions import RopeShift, rope_shift
from meshlm.workers.media.tensors import MediaError
from meshlm.workers.rows.changes import I32, I64
from meshlm.workers.rows.device_rows import DeviceRows, put
from meshlm.workers.rows.extras.extra import RowExtra, StepExtra, StepFindings
from meshlm.workers.rows.step_columns import Mark, StepColumns


class Encodes(Protocol):
    """What makes vectors of items (workers/media/stage.py)."""

    def vectors(self, items: Sequence[MediaItem]) -> list[Tensor | MediaError]:
        """[vectors, width] of each, or why there are none."""

    def reserve(self) -> None:
        """Takes the most memory that it may keep."""

    def load(self, resolved: Resolved) -> None:
        """Reads other weights. ProcessFatal."""

    def weights(self) -> list[Tensor]: ...


class _Part(NamedTuple):
    """Some of an item's vectors, of one row of a step."""

    place: int  # of the row, in the batch
    item: MediaItem
    first: int  # of the item's vectors
    tokens: I64  # [n]: the step's tokens that take them


class MediaStep(StepExtra[Tensor]):
    def __init__(
        self,
        rows: DeviceRows,
        encoder: Encodes | None,
        parts: list[_Part],
        shift: I64 | None,
        failed: dict[int, RowFailed],
        uncut: tuple[UncutRun, ...] = (),
    ) -> None:
        """encoder: None on a stage that embeds no tokens. shift: of M-RoPE [3, t]. failed: by place, what is known to be wrong."""
        self._rows, self._encoder, self._parts, self._shift, self._failed = rows, encoder, parts, shift, failed
        self._uncut = uncut
        if uncut:
            self.why_no_graph, self.reads_across = "images whose tokens attend to one another", True

    def before_model(self) -> None:
        buffers = self._rows.media
        assert buffers is not None
        buffers.in_use, buffers.uncut = True, self._uncut
        if self._shift is not None and buffers.rope_shift is not None:
            buffers.rope_shift[:, : self._shift.shape[1]] = put(self._shift, buffers.rope_shift.device)
        if self._encoder is None or not self._parts:
            return
        items = list({part.item.digest: part.item for part in self._parts}.values())
        found = dict(zip((item.digest for item in items), self._encoder.vectors(items), strict=True))
        for part in self._parts:
            vectors = found[part.item.digest]
            if isinstance(vectors, MediaError):
                self._failed[part.place] = RowFailed(str(vectors), ErrorKind.INTERNAL)
            else:
                self._put(vectors[part.first : part.first + len(part.tokens)], part.tokens)

    def _put(self, lines: Tensor, tokens: I64) -> None:
        vectors, media = self._rows.vectors, self._rows.media
        assert vectors is not None
        assert media is not None
        at, hidden = put(tokens, vectors.device), vectors.shape[1]
        vectors.index_copy_(0, at, lines[:, :hidden])
        if media.deepstack is not None:
            media.deepstack.index_copy_(1, at, lines[:, hidden:].unflatten(1, (-1, hidden)).transpose(0, 1))

    def after_head(self, tokens: I32, end: Mark, counts: I32 | None = None) -> None:
        """Steps without images find zeros."""
        media = self._rows.media
        assert media is not None
        media.in_use, media.uncut = False, ()
        if self._shift is not None and media.rope_shift is not None:
            media.rope_shift[:, : self._shift.shape[1]].zero_()
        if media.deepstack is not None:
            for part in self._parts:
                media.deepstack.index_fill_(1, put(part.tokens, media.deepstack.device), 0)

    def findings(self) -> StepFindings:
        return StepFindings(failed=self._failed)


class ReservedMemory(StepExtra[Tensor]):
    def __init__(self, encoder: Encodes) -> None:
        self._encoder = encoder

    def before_model(self) -> None:
        self._encoder.reserve()


class MediaRows(RowExtra[Tensor]):
    extra = Media

    def __init__(self, rows: DeviceRows, encoder: Encodes | None, resolved: Callable[[], Resolved]) -> None:
        """resolved: of the weights that the model has."""
        self._rows, self.encoder, self._resolved = rows, encoder, resolved
        self._items: dict[int, tuple[MediaItem, ...]] = {}  # of rows whose vectors are not all computed
        self._shifts: dict[int, RopeShift] = {}
        self._failed: dict[int, RowFailed] = {}
        self._behind = np.zeros(rows.table.num_rows, np.int64)  # by row: the shift of its latest tokens

    def rewritten(self, new: NewRow) -> NewRow:
        token_ids = np.frombuffer(new.token_ids, np.int32).copy()
        for item in _items_of(new):
            span = token_ids[item.position : item.position + item.num_tokens]
            span[np.frombuffer(item.is_vector, np.uint8)[: len(span)] != 0] = MEDIA
        return replace(new, token_ids=token_ids.tobytes())

    def add_row(self, new: NewRow) -> None:
        items = self._items[new.row] = _items_of(new)
        media = self._rows.media
        if media is None or media.rope_shift is None:
            return
        try:
            shift = self._shifts[new.row] = rope_shift(items)
        except ValueError as error:
            self._failed[new.row] = RowFailed(f"the positions of an image cannot be told: {error}", ErrorKind.INTERNAL)
        else:
            self._behind[new.row] = shift.behind

    def remove_row(self, row: int) -> None:
        for of_row in (self._items, self._shifts, self._failed):
            of_row.pop(row, None)
        self._behind[row] = 0

    def for_step(self, step: StepColumns) -> StepExtra[Tensor] | None:
        failed = {place: self._failed[row] for place, row in enumerate(step.rows.tolist()) if row in self._failed}
        shift = self._shift_of(step)
        uncut = self._uncut_of(step) if self._items else ()
        parts = self._parts_of(step) if self._items else []
        if not parts and shift is None and not failed:
            return None
        return MediaStep(self._rows, self.encoder, parts, shift, failed, uncut)

    def for_largest_step(self) -> StepExtra[Tensor] | None:
        return None if self.encoder is None else ReservedMemory(self.encoder)

    def weights(self) -> list[Any]:
        return [] if self.encoder is None else self.encoder.weights()

    def weights_changed(self) -> None:
        if self.encoder is not None:
            self.encoder.load(self._resolved())

    def _shift_of(self, step: StepColumns) -> I64 | None:
        if not self._shifts or not any(row in self._shifts for row in step.rows.tolist()):
            return None
        found: I64 = np.tile(self._behind[step.of_tokens()[0]], (3, 1))
        begins = np.cumsum(step.counts) - step.counts
        for place in np.flatnonzero(step.counts > 0).tolist():
            row, start, count = int(step.rows[place]), int(step.starts[place]), int(step.counts[place])
            if row in self._shifts and 0 <= start < self._shifts[row].by_token.shape[1]:
                found[:, begins[place] : begins[place] + count] = self._shifts[row].of(start, count)
        return found

    def _uncut_of(self, step: StepColumns) -> tuple[UncutRun, ...]:
        found, begins = [], np.cumsum(step.counts) - step.counts
        for place, row in enumerate(step.rows.tolist()):
            start, end = int(step.starts[place]), int(step.starts[place]) + int(step.counts[place])
            for begin, behind in (run for item in self._items.get(row, ()) for run in _runs(item)):
                low, high = max(begin, start), min(behind, end)
                if low < high:
                    first = int(begins[place]) + low - start
                    found.append(UncutRun(place, row, first, high - low, low, begin, behind))
        return tuple(found)

    def _parts_of(self, step: StepColumns) -> list[_Part]:
        """Forgets the items of rows whose last vector is computed with this step."""
        found, begins = [], np.cumsum(step.counts) - step.counts
        for place, row in enumerate(step.rows.tolist()):
            if row not in self._items:
                continue
            start, end = int(step.starts[place]), int(step.starts[place]) + int(step.counts[place])
            for item in self._items[row]:
                places = item.position + np.flatnonzero(np.frombuffer(item.is_vector, np.uint8))
                low, high = np.searchsorted(places, (start, end)).tolist()
                if low < high:
                    found.append(_Part(place, item, low, begins[place] + places[low:high] - start))
            last = self._items[row][-1]
            if end >= last.position + last.num_tokens:
                del self._items[row]
        return found


def _runs(item: MediaItem) -> list[tuple[int, int]]:
    """The positions (first, behind the last) of the vectors that attend to one another: those of a tile, of several."""
    if not item.is_uncut:
        return []
    is_vector = np.concatenate(([0], np.frombuffer(item.is_vector, np.uint8), [0])).astype(np.int8)
    edges = item.position + np.flatnonzero(np.diff(is_vector))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def _items_of(new: NewRow) -> tuple[MediaItem, ...]:
    media = find_extra(new.extras, Media)
    assert media is not None
    return media.items
