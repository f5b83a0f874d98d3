"""A load brings blocks that lie elsewhere into the prefix cache. Everything that it can be stands here.

A load is ASKED while holders say what they have of the wanted keys. When all have answered, or the limit has passed, the scheduler
chooses. Where nothing is worth it, the load is OVER; else pages are allocated and leased, and it is MOVING until all workers have
copied all of them, whatever becomes of those that wait: nothing else may write these pages. Then the leases of the holders end, and the
load is ENDING until each has said whether its lease had held: only then is what was copied known to be what was leased. What counts
goes to the prefix cache. If somebody waits for it the load is LOADED, and keeps it from being evicted, until that request starts, ends,
or others are short of memory; then it is OVER. A reset of the prefix cache makes all loads count for nothing; those that are MOVING end
as ever.

A request waits for a load that is ASKED, MOVING or ENDING (Wait.KV), without a row, and others pass it. It may stop to wait at any
time: it finds in the cache what there is, and computes the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from meshlm.protocol.edges.kv import PageMemory
from meshlm.protocol.wire.ids import Identity
from meshlm.runtime.process.events import check_transition
from meshlm.scheduler_proc.kv.lease import Key, Lease


class LoadState(Enum):
    """See above."""

    ASKED = "asked"
    MOVING = "moving"
    ENDING = "ending"
    LOADED = "loaded"
    OVER = "over"


TRANSITIONS: dict[LoadState, tuple[LoadState, ...]] = {
    LoadState.ASKED: (LoadState.MOVING, LoadState.OVER),
    LoadState.MOVING: (LoadState.ENDING,),
    LoadState.ENDING: (LoadState.LOADED, LoadState.OVER),
    LoadState.LOADED: (LoadState.OVER,),
    LoadState.OVER: (),
}
WAITED_FOR = (LoadState.ASKED, LoadState.MOVING, LoadState.ENDING)


@dataclass(slots=True, eq=False)
class Source:
    """One that was asked for keys, and what it has: a holder, or a connector of the workers."""

    kind: str  # "rank", "store", or the connector's name
    number: int
    missing: set[Identity]  # who has not answered: several workers of a connector
    holder: Identity | None = None  # None: a connector
    params: bytes = b""
    has: dict[bytes, Sequence[int]] | None = None  # key -> its pages there; None: nobody has answered
    memory: tuple[PageMemory, ...] = ()  # by worker
    is_leased: bool = False  # the lease has to be ended
    is_ending: bool = False  # its answer to EndLease is due
    lost: str = ""  # why nothing counts that was copied from it


@dataclass(slots=True, eq=False)
class Load:
    """Plain data; loads.py changes it."""

    hashes: list[bytes]  # of the blocks of a text
    asked: list[Key]
    sources: list[Source]
    since_ns: int  # when it was asked, or began to move or to end
    is_wanted: bool  # whatever it costs: another has computed these blocks for this request
    num_resets: int  # of the pool
    state: LoadState = LoadState.ASKED
    num_hit: int = 0  # blocks that were cached when it began to move
    chosen: dict[Key, Source] = field(default_factory=dict)  # what is copied, in the order of the pages of `lease`
    lease: Lease | None = None  # pages that are copied into, or what is kept cached
    reserved: Lease | None = None  # pages of one that found too few before, while it is ASKED
    present: Lease | None = None  # cached pages before and between these, while it moves
    failed: dict[Key, str] = field(default_factory=dict)  # and why

    @property
    def waits(self) -> bool:
        """Whether its requests wait."""
        return self.state in WAITED_FOR

    def move(self, state: LoadState) -> None:
        """Change state. InvalidTransition when the table has no such entry."""
        check_transition(TRANSITIONS, self.state, state, "a load of KV")
        self.state = state
