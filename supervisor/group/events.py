"""The events that the process group is told and the effects that it answers with (core.py). rolling.py adds its own."""

from msgspec import Struct

from meshlm.protocol.wire.ids import Identity, Incarnation


class Exited(Struct, frozen=True, tag="exited"):
    """The operating system says that this incarnation is over. `code` < 0: killed by that signal."""

    identity: Identity
    incarnation: Incarnation
    code: int
    reason: str = ""  # why it could not be started at all
    has_requests: bool = False  # it had some, one of which may have done it


class BecameReady(Struct, frozen=True, tag="ready"):
    identity: Identity
    incarnation: Incarnation


class Beaten(Struct, frozen=True, tag="beat"):
    identity: Identity
    incarnation: Incarnation
    step: int
    phase: str


class SaidFailed(Struct, frozen=True, tag="failed"):
    """The process's last words. fits: see `Failed`."""

    identity: Identity
    incarnation: Incarnation
    message: str
    fits: int = 0


class Start(Struct, frozen=True, tag="start"):
    """Start everything."""


class Add(Struct, frozen=True, tag="add"):
    """Start these too."""

    identities: tuple[Identity, ...]


class Retire(Struct, frozen=True, tag="retire"):
    """Take these out, when they are drained or at `deadline`."""

    identities: tuple[Identity, ...]
    deadline: float


class Drained(Struct, frozen=True, tag="drained"):
    """These have nothing left to do. Those that do not leave are ignored."""

    identities: tuple[Identity, ...]


class Stop(Struct, frozen=True, tag="stop"):
    """End everything in good order."""


class Tick(Struct, frozen=True, tag="tick"):
    """Time went on."""


class StepsEnded(Struct, frozen=True, tag="steps_ended"):
    """No step of the mesh runs any more, or nobody could be asked."""


Event = Exited | BecameReady | Beaten | SaidFailed | Start | Add | Retire | Drained | Stop | StepsEnded | Tick


class Spawn(Struct, frozen=True, tag="spawn"):
    identity: Identity
    incarnation: Incarnation


class TellDied(Struct, frozen=True, tag="tell_died"):
    """Tell every other process."""

    identity: Identity
    incarnation: Incarnation


class AskToStop(Struct, frozen=True, tag="ask_to_stop"):
    identity: Identity


class EndSteps(Struct, frozen=True, tag="end_steps"):
    """Have all workers of the mesh end their steps in order; StepsEnded follows, soon in any case."""


class Replace(Struct, frozen=True, tag="replace"):
    """Stuck: dump its stacks, then kill it; its Exited follows."""

    identity: Identity
    reason: str


class Kill(Struct, frozen=True, tag="kill"):
    """Kill this process at once; its Exited follows."""

    identity: Identity


class Changed(Struct, frozen=True, tag="changed"):
    """A change is done: added processes are ready, or leaving ones are gone. With a failure, added ones are taken away again."""

    failure: str = ""


class AllReady(Struct, frozen=True, tag="all_ready"):
    """Every process was ready at the same time, for the first time."""


class AllStopped(Struct, frozen=True, tag="all_stopped"):
    pass


class GiveUp(Struct, frozen=True, tag="give_up"):
    """Kill all and end with this text. fits: tokens of context with which a new start would go further; 0: none would."""

    message: str
    fits: int = 0


Effect = Spawn | TellDied | AskToStop | EndSteps | Replace | Kill | Changed | AllReady | AllStopped | GiveUp
