"""The map of the mesh: who talks to whom, with which messages, and what happens when a queue is full.

Every process binds one inbox (PULL) and connects one PUSH to each peer's inbox; a *link* is the pair of directions
between two processes, with session rules on top (session.py). This table alone decides which links exist, who opens
them, how much may be in flight, and what a full queue means.
"""

from enum import Enum
from functools import cache
from types import UnionType
from typing import NamedTuple

from meshlm.protocol.adapters import AdapterList
from meshlm.protocol.counts import Counted
from meshlm.protocol.edges import admit, control, kv, media, step, text, token
from meshlm.protocol.lockstep import JointOrder, JointReport
from meshlm.protocol.operations import Operation, OperationDone
from meshlm.protocol.wire.frames import HEADER_BYTES
from meshlm.protocol.wire.ids import Identity, Role


class WhenFull(Enum):
    """The fate of a message when `window` messages are unacknowledged and `max_queued` wait behind them, or they have `max_bytes`."""

    REFUSE = "refuse"  # raise LinkFull: the sender answers its request with 503
    DROP_PEER = "drop peer"  # the peer does not read: treat it as dead


class Channel(NamedTuple):
    """One direction of a link. `messages` is a Struct type or a union of tagged ones."""

    sender: Role
    receiver: Role
    messages: type | UnionType
    window: int  # messages in flight, unacknowledged
    max_queued: int  # messages waiting for credit
    when_full: WhenFull

    @property
    def max_bytes(self) -> int:
        """The limit of unacknowledged bytes: a message that can be refused is refused sooner than a peer is taken for dead."""
        return MAX_REFUSED_BYTES if self.when_full is WhenFull.REFUSE else MAX_QUEUED_BYTES


MAX_REFUSED_BYTES, MAX_QUEUED_BYTES = 256 << 20, 512 << 20
MAX_FRAME_BYTES = 64 << 20  # anything longer is refused by the socket (ZMQ_MAXMSGSIZE)
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - HEADER_BYTES  # and before that by the sender (Mesh.send)

_F, _D, _C, _S, _W, _ST, _M, _SUP = (
    Role.FRONTEND,
    Role.DETOKENIZER,
    Role.COORDINATOR,
    Role.SCHEDULER,
    Role.WORKER,
    Role.STORE,
    Role.MEDIA,
    Role.SUPERVISOR,
)
_MEMBER = control.Join | control.Leave | control.Blocked

CHANNELS: tuple[Channel, ...] = (
    Channel(_F, _D, text.FrontendToDetokenizer, 4096, 65536, WhenFull.REFUSE),
    Channel(_D, _F, text.DetokenizerToFrontend, 4096, 65536, WhenFull.DROP_PEER),
    Channel(_D, _C, admit.DetokenizerToCoordinator | _MEMBER, 4096, 65536, WhenFull.REFUSE),
    Channel(_C, _D, admit.CoordinatorToDetokenizer | control.Members, 4096, 65536, WhenFull.DROP_PEER),
    Channel(
        _C, _S, admit.CoordinatorToScheduler | control.Members | Operation | JointOrder, 4096, 65536, WhenFull.DROP_PEER
    ),
    Channel(
        _S, _C, admit.SchedulerToCoordinator | _MEMBER | OperationDone | JointReport, 4096, 65536, WhenFull.DROP_PEER
    ),
    Channel(_S, _D, token.SchedulerToDetokenizer, 4096, 65536, WhenFull.DROP_PEER),
    Channel(_D, _S, token.DetokenizerToScheduler, 1024, 65536, WhenFull.DROP_PEER),
    Channel(_S, _W, step.SchedulerToWorker | Operation, 64, 64, WhenFull.DROP_PEER),
    Channel(_W, _S, step.WorkerToScheduler | OperationDone, 64, 64, WhenFull.DROP_PEER),
    Channel(_F, _C, _MEMBER | control.AskStats | Operation | AdapterList, 64, 1024, WhenFull.DROP_PEER),
    Channel(
        _C,
        _F,
        control.Members | control.MeshStats | control.QueueFull | OperationDone | AdapterList,
        256,
        1024,
        WhenFull.DROP_PEER,
    ),
    Channel(_W, _C, _MEMBER, 64, 1024, WhenFull.DROP_PEER),
    Channel(_C, _W, control.Members, 256, 1024, WhenFull.DROP_PEER),
    Channel(_S, _S, kv.SchedulerToScheduler, 1024, 65536, WhenFull.DROP_PEER),
    Channel(_S, _ST, kv.SchedulerToStore, 1024, 65536, WhenFull.DROP_PEER),
    Channel(_ST, _S, kv.StoreToScheduler, 1024, 65536, WhenFull.DROP_PEER),
    Channel(_F, _M, media.FrontendToMedia, 256, 4096, WhenFull.REFUSE),
    Channel(_M, _F, media.MediaToFrontend, 1024, 65536, WhenFull.DROP_PEER),
    Channel(_D, _M, media.DetokenizerToMedia, 256, 4096, WhenFull.REFUSE),
    Channel(_M, _D, media.MediaToDetokenizer, 64, 1024, WhenFull.DROP_PEER),
    Channel(_M, _C, _MEMBER | Counted, 64, 1024, WhenFull.DROP_PEER),
    Channel(_C, _M, control.Members, 256, 1024, WhenFull.DROP_PEER),
    Channel(_ST, _C, _MEMBER | Counted, 64, 1024, WhenFull.DROP_PEER),
    Channel(_C, _ST, control.Members, 256, 1024, WhenFull.DROP_PEER),
    Channel(
        _F,
        _SUP,
        control.ChildToSupervisor | control.DashboardToSupervisor | control.OperatorToSupervisor,
        256,
        4096,
        WhenFull.DROP_PEER,
    ),
    *(Channel(role, _SUP, control.ChildToSupervisor, 256, 4096, WhenFull.DROP_PEER) for role in (_D, _S, _W, _ST, _M)),
    Channel(_C, _SUP, control.ChildToSupervisor | OperationDone, 256, 4096, WhenFull.DROP_PEER),
    Channel(_SUP, _SUP, control.SupervisorToSupervisor, 256, 4096, WhenFull.DROP_PEER),
    Channel(
        _SUP,
        _F,
        control.SupervisorToChild | control.SupervisorToDashboard | control.RanksScaled,
        256,
        4096,
        WhenFull.DROP_PEER,
    ),
    *(Channel(_SUP, role, control.SupervisorToChild, 256, 4096, WhenFull.DROP_PEER) for role in (_D, _S, _W, _ST, _M)),
    Channel(_SUP, _C, control.SupervisorToChild | Operation | control.Blocked, 256, 4096, WhenFull.DROP_PEER),
)

BY_DIRECTION: dict[tuple[Role, Role], Channel] = {(c.sender, c.receiver): c for c in CHANNELS}


@cache
def peers_of(role: Role) -> frozenset[Role]:
    """The roles that a process of `role` keeps links with."""
    return frozenset(c.receiver for c in CHANNELS if c.sender is role)


def are_linked(one: Identity, other: Identity, workers_per_rank: int, shares_pages: bool = False) -> bool:
    """Whether these two processes keep a link: their roles decide; a scheduler has links with its own workers only, and with other
    schedulers where ranks read one another's pages."""
    if other.role not in peers_of(one.role):
        return False
    if one.role is Role.SCHEDULER and other.role is Role.SCHEDULER:
        return shares_pages and one.index != other.index
    if one.role is Role.SCHEDULER and other.role is Role.WORKER:
        return other.index // workers_per_rank == one.index
    if one.role is Role.WORKER and other.role is Role.SCHEDULER:
        return one.index // workers_per_rank == other.index
    return True
