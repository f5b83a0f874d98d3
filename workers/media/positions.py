"""The positions of M-RoPE (Qwen2-VL, Wang et al. 2024): a token of text has one on all three axes, a vector its frame, row and column.

Text behind an image or a video goes on from as many positions as that has rows or columns, whichever are more: a row does not lie as
far from the text behind it as its vectors' number says. The frames of a
video may be at higher positions than that text.
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
    parts, end, shift = [], 0, 0  # shift: what the next token's position is more than its place
    for item in items:
        if item.modality is Modality.AUDIO:  # one vector behind another, as text
            continue
        parts.append(np.full((3, item.position - end), shift, np.int64))
        own = _positions(item)
        parts.append(own.by_token + shift - np.arange(item.num_tokens))
        end = item.position + item.num_tokens
        shift += own.behind
    return RopeShift(np.concatenate(parts, axis=1) if parts else np.zeros((3, 0), np.int64), shift)


def _positions(item: MediaItem) -> RopeShift:
    """[3, tokens]: from the item's first token on, as if that were the prompt's first. Its vectors are the grid, in one run; or each of
    its frames is a run, with text between them."""
    frames, rows, columns = item.grid
    edges = np.flatnonzero(np.diff(np.frombuffer(b"\0" + item.is_vector + b"\0", np.int8))).reshape(-1, 2)
    if len(edges) not in (0, 1, frames) or len({end - begin for begin, end in edges.tolist()}) > 1:
        raise ValueError(f"{len(edges)} runs of vectors are no {frames} frames")
    if item.num_vectors != frames * rows * columns:
        raise ValueError(f"{item.num_vectors} vectors are no grid of {frames} x {rows} x {columns}")
    if item.times and (len(item.times) != frames or len(edges) != 1):
        raise ValueError(f"{len(item.times)} times are not those of {frames} frames in one run")
    found, shift, before = np.tile(np.arange(item.num_tokens), (3, 1)), 0, 0
    for begin, end in edges.tolist():
        found[:, before:begin] += shift
        grid = np.indices((frames // len(edges), rows, columns)).reshape(3, -1)
        if item.times:
            grid[0] = np.array(item.times)[grid[0]]
        found[:, begin:end] = begin + shift + grid
        shift += max(rows, columns) - (end - begin)
        before = end
    found[:, before:] += shift
    return RopeShift(found, shift)
