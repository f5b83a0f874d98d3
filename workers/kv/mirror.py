"""What the scheduler knows of the KV cache, kept where a scheduler's death does not reach: which block holds which prefix. Pure.

Plans bring the changes; `WorkerReady` gives all of it to the next scheduler, which goes on with the prefix cache of the one before, so
that the requests that it takes up again find their tokens computed. Owned by io.py.
"""

from collections.abc import Iterable

from meshlm.protocol.edges.step import HASH_BYTES, StepPlan
from meshlm.protocol.wire.columns import ints, pack_i32

MAX_KEPT = 1 << 20  # blocks that one message names: 36 MiB


class PrefixCacheMirror:
    """Least recently remembered first."""

    def __init__(self) -> None:
        self._hashes: dict[int, bytes] = {}
        self._session = 0
        self._spoiled = False

    def apply(self, plan: StepPlan) -> None:
        """Notes what the blocks hold once the plan is done. The first plan of a session says all that its scheduler took over."""
        if plan.session != self._session:
            self._session, self._spoiled = plan.session, False
            self._hashes.clear()
        if plan.forgotten:
            for block in ints(plan.forgotten):
                self._hashes.pop(block, None)
        if plan.remembered:
            for nth, block in enumerate(ints(plan.remembered)):
                self._hashes.pop(block, None)  # it counts as the latest now
                self._hashes[block] = plan.hashes[nth * HASH_BYTES : (nth + 1) * HASH_BYTES]

    def forget(self, blocks: Iterable[int]) -> None:
        """These are about to be overwritten from outside: whoever comes next finds nothing there, unless a plan says so again."""
        for block in blocks:
            self._hashes.pop(block, None)

    def spoil(self) -> None:
        """A step failed: what it and those after it should have written is not there. Nothing is kept of this session."""
        self._spoiled = True

    def reset_prefix_cache(self) -> None:
        """The next scheduler finds nothing of what the plans so far have brought."""
        self._hashes.clear()

    def columns(self) -> tuple[bytes, bytes]:
        """Blocks as int32, and their hashes; the latest MAX_KEPT."""
        if self._spoiled:
            return b"", b""
        blocks, hashes = list(self._hashes), list(self._hashes.values())
        first = max(0, len(blocks) - MAX_KEPT)
        while 0 < first < len(blocks) and hashes[first] == hashes[first - 1]:
            first += 1  # blocks of several groups may have one key: all of them, or none
        return pack_i32(blocks[first:]), b"".join(hashes[first:])
