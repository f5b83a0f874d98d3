"""Pages that workers of the simulation copy from one another: a page at a time, at any time after they were asked for it.

In the place of workers/kv/moves.py. The memory of a worker that died stays as it was for those who read it, as a mapped file does.
"""

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from meshlm.protocol.edges.kv import NAMESPACE_BYTES, FindPages, MovePages, PageMemory, PagesMoved, Segment
from meshlm.protocol.edges.step import WorkerReady
from meshlm.protocol.wire.columns import ints, pack_i32

if TYPE_CHECKING:
    from group import Worker

SLOT_BYTES = 8
COPY_S = 0.02  # of a page, at most
FAILS = 0.05  # how often a copy of a page fails, and all behind it


class SimulatedMoves:
    """The moves of one worker."""

    def __init__(self, worker: "Worker", process: Any) -> None:
        self._worker, self._process = worker, process
        self.session = 0
        self._path = f"{process.identity}-{process.incarnation}"
        process.world.memories[self._path] = worker._model

    def described(self, ready: WorkerReady) -> WorkerReady:
        """The same with what the scheduler has to know."""
        model = self._worker._model
        page_bytes = SLOT_BYTES * model.block_size
        memory = PageMemory(self._path, model.num_blocks, (Segment(0, page_bytes, page_bytes),))
        return replace(ready, page_bytes=page_bytes, namespace=b"n" * NAMESPACE_BYTES, pages=memory)

    def begin(self, session: int) -> None:
        """What is of another session stops."""
        self.session = session

    def wait(self) -> None:
        """A page is copied in no time: nothing of an earlier session is being copied."""

    def close(self) -> None: ...

    def find(self, find: FindPages) -> None:
        """Nobody asks: there are no connectors."""
        raise AssertionError(find)

    def move(self, move: MovePages) -> None:
        """Behind the steps before it, beside those that follow."""
        self._process.world.tell(self._process, "moves", self._process.identity, f"pages {ints(move.pages)}")
        self._copy(move, 0)

    def _copy(self, move: MovePages, nth: int) -> None:
        """One page, and later the next."""
        pages, there = ints(move.pages), ints(move.there)
        assert move.memory is not None
        late = self._process.world.now * 1e9 > move.deadline_ns > 0
        if nth == len(pages) or late or move.session != self.session or self._process.dice.random() < FAILS:
            failed = pack_i32(range(nth, len(pages)))
            self._worker._say(
                PagesMoved(move.session, move.number, failed, nth * SLOT_BYTES, 1, "" if not failed else "x")
            )
            return
        own, other = self._worker._model, self._process.world.memories[move.memory.path]
        here, size = pages[nth] * own.block_size, own.block_size
        from_, to = there[nth] * size, here
        if move.is_load:
            own.slots[to : to + size] = other.slots[from_ : from_ + size]
        else:
            other.slots[from_ : from_ + size] = own.slots[to : to + size]
        self._worker._later(self._process.dice.random() ** 3 * COPY_S, self._copy, move, nth + 1)
