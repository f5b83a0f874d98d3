"""Copies that the workers of a rank are making: who has not answered, and what failed. Pure; used by loads.py and saves.py."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshlm.protocol.edges.kv import MovePages, PageMemory, PagesMoved
from meshlm.protocol.wire.columns import ints, pack_i32
from meshlm.protocol.wire.ids import BlockId, Identity
from meshlm.scheduler_proc.connectors.session import PageSession

MOVE_NS = 30_000_000_000  # the most that a copy may take


@dataclass(slots=True, eq=False)
class Move:
    """Pages that all workers copy, each its slices of them. `kind` is who has the other end: "rank", "store" or a connector."""

    kind: str
    is_load: bool
    pages: Sequence[BlockId]
    there: Sequence[int] = ()
    memory: tuple[PageMemory, ...] = ()  # by worker; none: a connector moves them
    keys: Sequence[bytes] = ()  # with a connector: of each page
    params: bytes = b""
    deadline_ns: int = 0
    number: int = 0
    unmoved: set[Identity] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)  # places in `pages`
    message: str = ""  # why the first failed
    duration_ns: int = 0  # of the slowest worker


class Moves:
    """The copies of one session."""

    def __init__(self, session: PageSession) -> None:
        self._session = session
        self._by_number: dict[int, Move] = {}

    def begin(self, move: Move) -> None:
        """All workers are to make this copy."""
        session = self._session
        move.number, move.unmoved = next(session.numbers), set(session.workers)
        self._by_number[move.number] = move
        for nth, worker in enumerate(session.workers):
            message = MovePages(
                session=session.number,
                number=move.number,
                is_load=move.is_load,
                pages=pack_i32(move.pages),
                there=pack_i32(move.there),
                memory=move.memory[nth] if move.memory else None,
                connector="" if move.memory else move.kind,
                keys=b"".join(move.keys),
                params=move.params,
                deadline_ns=move.deadline_ns,
            )
            session.send(worker, message)

    def moved(self, worker: Identity, answer: PagesMoved) -> Move | None:
        """A worker has answered: the move, if it was the last to do so. Answers of earlier sessions and doubled ones are for nobody."""
        move = self._by_number.get(answer.number)
        if move is None or answer.session != self._session.number or worker not in move.unmoved:
            return None
        move.unmoved.remove(worker)
        if answer.failed:
            move.failed.update(ints(answer.failed))
            move.message = move.message or f"{worker}: {answer.message or 'the copy failed'}"
        move.duration_ns = max(move.duration_ns, answer.duration_ns)
        kind, counts = f"{move.kind}_to_device" if move.is_load else f"device_to_{move.kind}", self._session.counts
        counts.add("kv_offload_total_bytes", kind, answer.num_bytes)
        if move.unmoved:
            return None
        counts.add("kv_offload_total_time", kind, move.duration_ns / 1e9)
        return self._by_number.pop(answer.number)
