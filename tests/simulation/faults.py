"""What goes wrong in a history, and in what sort of mesh."""

import os
from enum import Enum

from msgspec import Struct

from meshlm.protocol.operations import Pause, RebalanceExperts, ResetPrefixCache, UpdateWeights
from meshlm.protocol.wire.ids import Identity, Role


class Kind(Enum):
    """What goes wrong."""

    KILL_FRONTEND = "kill frontend"
    KILL_DETOKENIZER = "kill detokenizer"
    KILL_COORDINATOR = "kill coordinator"
    KILL_SCHEDULER = "kill scheduler"
    KILL_WORKER = "kill worker"
    KILL_SENDING = "kill a scheduler between sending to one worker and to the next"
    CUT = "cut the link between two hosts"
    CUT_ONE_WAY = "cut it in one direction"
    TWICE = "everything on a link comes twice, the second time beside later frames"
    BREAK = "break a connection: some of what is in flight is lost"
    SLOW = "slow a link down: replays, and everything comes twice"
    PAUSE = "pause a process"
    SCALE = "all ranks but the first are to be removed, and come back"
    ROLES = "the second of three ranks is for prompts, and decodes again (only where ranks have roles)"
    RESET = "the prefix cache is reset, and what runs is computed anew"
    REBALANCE = "experts are to move between ranks that step together"
    UPDATE = "a trainer updates the weights from another folder"
    HOLD = "an operator pauses the mesh, and has it go on"
    LOSE_LINK = "one end of a link between a frontend and a detokenizer gives it up, although both live"
    EARLY_WORD = "a peer is heard before App.start has run"


# What the product cannot take yet, and why. An entry goes when its bug is mended; MESHLM_SIM_ALL=1 ignores them all.
OFF: dict[Kind, str] = {}
if os.environ.get("MESHLM_SIM_ALL"):
    OFF.clear()

KILLS = {
    Kind.KILL_FRONTEND: Role.FRONTEND,
    Kind.KILL_DETOKENIZER: Role.DETOKENIZER,
    Kind.KILL_COORDINATOR: Role.COORDINATOR,
    Kind.KILL_SCHEDULER: Role.SCHEDULER,
    Kind.KILL_WORKER: Role.WORKER,
    Kind.KILL_SENDING: Role.SCHEDULER,
}
OPERATIONS = {
    Kind.RESET: ResetPrefixCache(preempt=True),
    Kind.REBALANCE: RebalanceExperts(),
    Kind.HOLD: Pause(),
    Kind.UPDATE: UpdateWeights(),  # its source is the next one
}
ENDS = (Role.FRONTEND, Role.DETOKENIZER)  # of a link that is given up
CUTS = (Kind.CUT, Kind.CUT_ONE_WAY)
FAULTS = (
    *KILLS,
    Kind.BREAK,
    Kind.SLOW,
    Kind.TWICE,
    Kind.PAUSE,
    Kind.SCALE,
)  # EARLY_WORD is always there, unless it is OFF


class Shape(Enum):
    """What sort of mesh it is."""

    PLAIN = "one host, one worker for each rank"
    GROUP = "one host, several workers for each rank"
    LOCKSTEP = "one host, two or four ranks that step together"
    HOSTS = "ranks on the head and on another host"
    FAR_HOSTS = "all ranks on another host"
    SPANNING = "a group of workers that spans two hosts"


SHAPES = (
    *(Shape.PLAIN,) * 4,
    Shape.LOCKSTEP,
    *(Shape.GROUP,) * 2,
    Shape.HOSTS,
    Shape.FAR_HOSTS,
    Shape.SPANNING,
)  # as often as here


class Fault(Struct, frozen=True):
    """Happens when that many frames have arrived anywhere (or at the latest when nothing else happens)."""

    at_frame: int
    kind: Kind
    who: Identity
    peer: Identity | None = None
    seconds: float = 0.0
