"""Finds the decodes of a step whose block tables begin with the same pages, and lays out what attention reads together of them
(kernels/attention/shared_prefix.py). Host side, numpy; knows no device. Owned by the rows, used by the stepper thread.

Block tables are kept in lexicographic order, each with the number of pages that it has in common with the one before. So requests that
share a prefix stand beside one another, whatever number of prefixes there is, and a step whose decodes are those of the step before
costs one comparison.
"""

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshlm.kernels.attention.kernel import ITEM, PREFIX_STEP
from meshlm.kernels.attention.tiles import SharedSizes
from meshlm.workers.rows.changes import I32
from meshlm.workers.rows.table import aligned

LEAST_SAVED = 192 << 20
"""Bytes of a layer's keys and values that a step must not read again at the least, for its prefixes to be worth a kernel more: with
the heads of Llama 3.1 8B about 160 MiB break even on an H200, with those of Qwen3-30B-A3B about 200 (shared_prefix_h200.json)."""
LEAST_OF_CLUSTER = 1_024  # ... and those of one cluster, for its place in the kernel
I64 = NDArray[np.int64]
Interval = tuple[int, int, int]


class Clusters(NamedTuple):
    """Requests that share prefixes, one cluster after the other."""

    places: I32  # of the requests in the step
    sizes: I64  # requests of each cluster
    tokens: I64  # of each cluster's prefix

    @property
    def saved(self) -> int:
        """Tokens that are not read again."""
        return int(((self.sizes - 1) * self.tokens).sum())


def partition(common: list[int]) -> list[Interval]:
    """Requests in a row, of which each two neighbours have so much in common: the clusters (first, behind the last, tokens of all)
    that save the most, where what has less in common than its neighbours is a place to cut.

    A cluster of k requests saves (k - 1) times its prefix. One is cut where it has the least in common, if the clusters within save
    more than it does."""
    found: list[Interval] = []
    opened: list[tuple[int, int, int, list[Interval]]] = []  # in common, first, saved within, clusters within
    last = 0
    for edge, tokens in enumerate([*common, 0]):
        if tokens == last:
            continue
        last, first, saved = tokens, edge, 0
        clusters: list[Interval] = []
        while opened and opened[-1][0] > tokens:
            length, first, saved_before, before = opened.pop()
            saved, clusters = saved_before + saved, before + clusters
            whole = length * (edge - first)
            if whole >= saved:
                saved, clusters = whole, [(first, edge + 1, length)]
        if not tokens:
            found += clusters
        elif opened and opened[-1][0] == tokens:
            length, first, saved_before, before = opened.pop()
            opened.append((length, first, saved_before + saved, before + clusters))
        else:
            opened.append((tokens, first, saved, clusters))
    return found


class PrefixTables:
    """The block tables of all rows, of one group of layers, and the clusters of the last step."""

    def __init__(self, group: int, block_size: int, max_rows: int, sizes: SharedSizes, token_bytes: int) -> None:
        """group: of layers that see all tokens. max_rows: of those that take part; a step has one more, which is padding.
        token_bytes: of a token's keys and values in a layer."""
        self.group, self.sizes = group, sizes
        self._block_size, self._max_rows, self._token_bytes = block_size, max_rows, token_bytes
        self._order: list[tuple[bytes, int]] = []  # tables and their rows, sorted
        self._common: list[int] = []  # pages that each has in common with the one before
        self._tables: dict[int, bytes] = {}  # by row
        self._last: bytes | None = None  # the decodes whose clusters are known
        self._clusters: Clusters | None = None
        self._packed: tuple[int, I32] | None = None  # of these clusters, for a size of step

    def reset(self) -> None:
        self._order, self._common, self._tables, self._last = [], [], {}, None

    def take(self, row: int, table: I32) -> None:
        """A request takes a row. Blocks that are appended later are its own."""
        self._leave(row)
        key = table.tobytes()
        at = bisect_left(self._order, (key, row))
        self._order.insert(at, (key, row))
        self._common.insert(at, self._in_common(at))
        if at + 1 < len(self._order):
            self._common[at + 1] = self._in_common(at + 1)
        self._tables[row] = key
        self._last = None

    def _leave(self, row: int) -> None:
        key = self._tables.pop(row, None)
        if key is None:
            return
        at = bisect_left(self._order, (key, row))
        del self._order[at]
        less = self._common.pop(at)
        if at < len(self._order):
            self._common[at] = min(less, self._common[at])

    def _in_common(self, at: int) -> int:
        """Pages that the table at this place has in common with the one before; tables are in whole ints, and so sorted."""
        if not at:
            return 0
        first, second = (np.frombuffer(self._order[n][0], np.int32) for n in (at - 1, at))
        count = min(len(first), len(second))
        differs = first[:count] != second[:count]
        return int(differs.argmax()) if differs.any() else count

    def of_decodes(self, rows: I32, starts: I32) -> Clusters | None:
        """The clusters among the decodes of a step, in its order; None where they save too little. starts: tokens of earlier steps,
        which grow while a row is taken: what could be shared once still can."""
        key = rows.tobytes()
        if self._last != key:
            self._clusters, self._last, self._packed = self._find(rows, starts), key, None
        return self._clusters

    def _find(self, rows: I32, starts: I32) -> Clusters | None:
        if max(self._common, default=0) * self._block_size < PREFIX_STEP:
            return None  # nobody shares anything
        place_of = np.full(self._max_rows + 1, -1, np.int32)
        place_of[rows] = np.arange(len(rows))
        places = place_of[np.array([row for _, row in self._order], np.int64)]
        at = np.flatnonzero(places >= 0)
        if len(at) < 2:
            return None
        places = places[at]
        pages = np.minimum.reduceat(np.array(self._common[: at[-1] + 1]), at[:-1] + 1)
        may_share = starts[places]
        tokens = np.minimum(pages * self._block_size, np.minimum(may_share[1:], may_share[:-1]))
        found = [
            cluster
            for cluster in partition((tokens // PREFIX_STEP * PREFIX_STEP).tolist())
            if (cluster[1] - cluster[0] - 1) * cluster[2] >= LEAST_OF_CLUSTER
        ]
        if not found:
            return None
        members = np.concatenate([places[first:end] for first, end, _ in found])
        sizes, lengths = (
            np.array(column) for column in zip(*((end - first, n) for first, end, n in found), strict=True)
        )
        clusters = Clusters(members, sizes, lengths)
        return clusters if clusters.saved * self._token_bytes >= LEAST_SAVED else None

    # --- what the device gets ---

    def offsets(self, size: int) -> list[int]:
        """Where items, members, tokens and parts begin, and where all ends, in a step of up to `size` requests: ints, aligned."""
        lengths = [ITEM * self.sizes.num_items(size), size, size, size]
        return [0, *np.cumsum([aligned(length) for length in lengths]).tolist()]

    def packed(self, clusters: Clusters, size: int) -> I32:
        """The clusters that `of_decodes` gave last, as kernels/attention/kernel.py has them, for a step of up to `size` requests."""
        if self._packed is None or self._packed[0] != size:
            self._packed = size, pack(clusters, size, self.sizes, self.offsets(size))
        return self._packed[1]


def pack(clusters: Clusters, size: int, sizes: SharedSizes, offsets: list[int]) -> I32:
    """Ints of items, members, tokens and parts. Pieces are about equal, as many as fill the GPU; those of the same keys follow one
    another, so that the tiles of a cluster find them in the cache."""
    num_tiles = -(-clusters.sizes // sizes.tile)
    piece = _steps(-(-int((num_tiles * clusters.tokens).sum()) // sizes.pieces))
    pieces = np.maximum(piece, _steps(-(-clusters.tokens // sizes.most_parts(size))))  # of each cluster, its tokens
    parts = -(-clusters.tokens // pieces)
    counts = num_tiles * parts
    cluster = np.repeat(np.arange(len(counts)), counts)
    nth = np.arange(len(cluster)) - np.repeat(np.cumsum(counts) - counts, counts)
    slot, tile = nth // num_tiles[cluster], nth % num_tiles[cluster]
    first = slot * pieces[cluster]
    begin = tile * sizes.tile
    items = np.stack(
        (
            (np.cumsum(clusters.sizes) - clusters.sizes)[cluster] + begin,
            np.minimum(sizes.tile, clusters.sizes[cluster] - begin),
            first,
            np.minimum(first + pieces[cluster], clusters.tokens[cluster]),
            slot,
        ),
        axis=1,
    )
    assert len(items) <= sizes.num_items(size)
    found = np.zeros(offsets[-1], np.int32)
    found[: items.size] = items.ravel()
    found[offsets[1] : offsets[1] + len(clusters.places)] = clusters.places
    found[offsets[2] + clusters.places] = np.repeat(clusters.tokens, clusters.sizes)
    found[offsets[3] + clusters.places] = np.repeat(parts, clusters.sizes)
    return found


def _steps(tokens: int | I64) -> I64:
    found: I64 = -(-np.asarray(tokens) // PREFIX_STEP) * PREFIX_STEP
    return found
