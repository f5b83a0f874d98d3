"""Which cached pages are written for certain: others than this rank's own steps may read them. Pure; owned by transfers.py.

The planner caches the keys of a step with its plan: steps behind it find them, as workers compute in order. Whoever reads a page from
outside waits until the result of the step is back. A step that fails, and a session that ends, leave nothing settled.
"""

from meshlm.protocol.edges.step import HASH_BYTES, StepPlan
from meshlm.protocol.wire.columns import ints
from meshlm.protocol.wire.ids import BlockId, StepId
from meshlm.scheduler_proc.kv.pool import BlockPool


class Settled:
    """Pages of one session's pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pages: set[BlockId] = set()
        self._writer: dict[
            BlockId, StepId
        ] = {}  # of pages with a key: the step in flight that was the last to cache them
        self._loaded: dict[BlockId, bytes] = {}  # pages that were copied from elsewhere, under this key
        self._plans: dict[StepId, StepPlan] = {}  # in flight, which cache something

    def loaded(self, key: bytes, pages: list[BlockId]) -> None:
        """These pages hold this key, which others have."""
        self._loaded.update(dict.fromkeys(pages, key))

    def planned(self, plan: StepPlan) -> None:
        """A plan says what changed since the one before."""
        for page in ints(plan.forgotten):
            self._forget(BlockId(page))
            self._loaded.pop(BlockId(page), None)
        for page in ints(plan.remembered):
            self._forget(BlockId(page))
            self._writer[BlockId(page)] = plan.step
        if plan.remembered:
            self._plans[plan.step] = plan

    def _forget(self, page: BlockId) -> None:
        self._pages.discard(page)
        self._writer.pop(page, None)

    def done(self, step: StepId) -> list[bytes]:
        """The result of this step is back: the keys that it settles, but for those that were loaded."""
        plan = self._plans.pop(step, None)
        keys: dict[bytes, None] = {}
        for nth, page in enumerate(map(BlockId, ints(plan.remembered)) if plan is not None else ()):
            if plan is not None and self._writer.get(page) == step:
                del self._writer[page]
                self._pages.add(page)
                key = plan.hashes[nth * HASH_BYTES : (nth + 1) * HASH_BYTES]
                if self._loaded.pop(page, b"") != key:
                    keys[key] = None
        return list(keys)

    def reset(self) -> None:
        """Nothing is cached any more, whatever the steps in flight bring."""
        for kept in (self._pages, self._writer, self._loaded, self._plans):
            kept.clear()

    def find(self, key: bytes) -> list[BlockId]:
        """The pages that are cached under a key, if they are settled; else none."""
        pages = self._pool.find(key) or ()
        if self._pages.issuperset(pages) and self._pool.holds_since_told(pages):
            return list(pages)
        return []
