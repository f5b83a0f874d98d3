"""How long pages of the KV cache live, lie idle before others need them, and wait between two uses (--kv-cache-metrics).

As vLLM measures it: a page is looked at from its allocation to its eviction, of its uses the last four. Every so-many-th allocation is
looked at, so that the planner pays for few. Pure; owned by pool.py, which says what happens.
"""

from collections import deque
from collections.abc import Iterable
from itertools import pairwise

from meshlm.protocol.wire.ids import BlockId
from meshlm.runtime.process.counts import Counts

KEPT_USES = 4


class Residency:
    """`now_ns` is the time of the step that is being planned."""

    def __init__(self, sample: float, counts: Counts) -> None:
        self.now_ns = 0
        self._every, self._seen = 1 / sample, 0.0
        self._born: dict[BlockId, int] = {}
        self._uses: dict[BlockId, deque[int]] = {}
        self._lifetime = counts.histograms["kv_block_lifetime_seconds"]
        self._idle = counts.histograms["kv_block_idle_before_evict_seconds"]
        self._gap = counts.histograms["kv_block_reuse_gap_seconds"]

    def allocated(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            self._seen += 1
            if self._seen >= self._every:
                self._seen -= self._every
                self._born[block] = self.now_ns
                self._uses[block] = deque(maxlen=KEPT_USES)

    def touched(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            if (uses := self._uses.get(block)) is not None:
                uses.append(self.now_ns)

    def evicted(self, block: BlockId) -> None:
        if (born := self._born.pop(block, None)) is None:
            return
        uses = list(self._uses.pop(block))
        self._lifetime.observe((self.now_ns - born) / 1e9)
        self._idle.observe((self.now_ns - (uses[-1] if uses else born)) / 1e9)
        for before, after in pairwise(uses):
            self._gap.observe((after - before) / 1e9)

    def forget(self) -> None:
        """The whole cache is reset, which says nothing about its pages."""
        self._born.clear()
        self._uses.clear()
