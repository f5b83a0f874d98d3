"""The positions of M-RoPE (Qwen2-VL, Wang et al. 2024): a token of text has one on all three axes, a vector its frame, row and column.

Text behind an image goes on from as many positions as the image has rows or columns, whichever are more: a row of an image does not
lie as far from the text behind it as its vectors' number says.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from meshlm.protocol.media import MediaItem, Modality
from meshlm.workers.rows.changes import I64


class RopeShift(NamedTuple):
    """What is added to a prompt's positions."""

    by_token: I64  # [3, tokens up to the end of the last item]
    behind: int  # of every later token, sampled ones too

    def of(self, start: int, count: int) -> I64:
        """[3, count], of the tokens from `start` on."""
        found = np.full((3, count), self.behind, np.int64)
        known = self.by_token[:, start : start + count]
        found[:, : known.shape[1]] = known
        return found


def rope_shift(items: Iterable[MediaItem]) -> RopeShift:
    """Of a prompt with these items, in its order. ValueError where a grid is not that of an item's vectors."""
    parts, end, behind = [], 0, 0  # behind: what the next token's position is more than its place
    for item in items:
        if item.modality is Modality.AUDIO:  # one vector behind another, as text
            continue
        parts.append(np.full((3, item.position - end), behind, np.int64))
        own = _positions(item)
        place = np.arange(item.num_tokens)
        parts.append(own + behind - place)
        end = item.position + item.num_tokens
        behind += _length(item) - item.num_tokens
    return RopeShift(np.concatenate(parts, axis=1) if parts else np.zeros((3, 0), np.int64), behind)


def _length(item: MediaItem) -> int:
    """The positions that an item takes."""
    return item.num_tokens - item.num_vectors + max(item.grid[1:])


def _positions(item: MediaItem) -> I64:
    """[3, tokens]: from the item's first token on. Its vectors are the grid, in one run."""
    frames, rows, columns = item.grid
    is_vector = np.frombuffer(item.is_vector, np.uint8) != 0
    places = np.flatnonzero(is_vector)
    if len(places) != frames * rows * columns or (len(places) and places[-1] - places[0] + 1 != len(places)):
        raise ValueError(f"{len(places)} vectors are no grid of {frames} x {rows} x {columns} in one run")
    first = int(places[0]) if len(places) else 0
    found = np.tile(np.arange(item.num_tokens), (3, 1))
    found[:, places] = first + np.indices((frames, rows, columns)).reshape(3, -1)
    found[:, first + len(places) :] -= len(places) - max(rows, columns)
    return found
