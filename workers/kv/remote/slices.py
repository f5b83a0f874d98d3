"""Pages cut by key-value heads, where the two meshes have another -tp: who has which heads, and the bytes of some of them in a page.

A page of a worker is uint8 [rows, heads of this worker, bytes of a head]: a row is a token of one layer's keys or values. What a mesh
asks of another, and what it sends, are slices of rows. Of models whose pages are not such rows `num_heads` is 0, and both meshes must
have the same -tp. Pure.
"""

from typing import NamedTuple

import numpy as np

from meshlm.workers.distributed.shard import Shard
from meshlm.workers.kv.connectors import Page


class PageShape(NamedTuple):
    """The pages of one worker, and its place in its rank."""

    page_bytes: int
    num_heads: int = 0  # key-value heads of the whole model; 0: pages are not cut
    head_bytes: int = 0
    shard: Shard = Shard()

    @property
    def place(self) -> int:
        """Of this worker in its rank."""
        return self.shard.rank

    @property
    def heads(self) -> range:
        """Those of this worker."""
        return self._heads(self.shard.tp_size, self.shard.tp_rank)

    def _heads(self, tp_size: int, tp_rank: int) -> range:
        if not self.num_heads:
            return range(tp_rank, tp_rank + 1)  # each has its own, and no others
        return range(*Shard(tp_rank, tp_size).kv_heads(self.num_heads))

    def taken_from(self, tp_size: int) -> dict[int, range]:
        """Which heads this worker reads from which tensor-parallel ranks of a mesh with so many: all of its own, each once."""
        return self._taken(self.shard.tp_size, self.shard.tp_rank, tp_size)

    def given_to(self, tp_size: int) -> dict[int, range]:
        """Which of this worker's heads each tensor-parallel rank of such a mesh reads here."""
        own = self.shard
        found = ((reader, self._taken(tp_size, reader, own.tp_size).get(own.tp_rank)) for reader in range(tp_size))
        return {reader: heads for reader, heads in found if heads is not None}

    def _taken(self, tp_size: int, tp_rank: int, others: int) -> dict[int, range]:
        """What rank `tp_rank` of `tp_size` reads from each of `others`. Where several have the same heads readers spread over them."""
        wanted, found = self._heads(tp_size, tp_rank), dict[int, range]()
        at = wanted.start
        while at < wanted.stop:
            having = [other for other in range(others) if at in self._heads(others, other)]
            other = having[tp_rank % len(having)] if others != tp_size else tp_rank
            found[other] = range(at, min(wanted.stop, self._heads(others, other).stop))
            at = found[other].stop
        return found

    def why_not(self, tp_size: int, pp_size: int) -> str:
        """Why pages cannot go between this mesh and one with such a -tp and -pp; empty: they can."""
        own = self.shard
        if pp_size != own.pp_size:
            return f"-pp is {pp_size} there and {own.pp_size} here"
        if tp_size != own.tp_size and not self.num_heads:
            why = "pages of this model (states, or layers with unequal heads) are not cut by heads"
            return f"-tp is {tp_size} there and {own.tp_size} here, and {why}"
        return ""

    def piece_bytes(self, heads: range) -> int:
        """The bytes of these heads in a page."""
        return self.page_bytes * len(heads) // len(self.heads)

    def cut(self, page: Page, heads: range) -> Page:
        """These heads of a page."""
        if heads == self.heads:
            return page
        return np.ascontiguousarray(self._rows(page)[:, self._within(heads)]).reshape(-1)

    def fill(self, page: Page, heads: range, piece: Page) -> None:
        """Puts these heads into a page."""
        rows = self._rows(page)[:, self._within(heads)]
        rows[:] = piece.reshape(rows.shape)

    def _rows(self, page: Page) -> Page:
        """uint8 [rows, heads, bytes of a head]."""
        return page.reshape(-1, len(self.heads), self.head_bytes)

    def _within(self, heads: range) -> slice:
        first = self.heads.start
        return slice(heads.start - first, heads.stop - first)
