"""The events that the process group is told and the effects that it answers with (core.py). rolling.py adds its own."""

from msgspec import Struct

from meshlm.protocol.wire.ids import Identity, Incarnation


class _OfIncarnation(Struct, frozen=True):
    identity: Identity
    incarnation: Incarnation


class Exited(_OfIncarnation, frozen=True, tag="exited"):
    """The operating system says that this incarnation is over. `code` < 0: killed by that signal."""

    code: int
    reason: str = ""  # why it could not be started at all
    has_requests: bool = False  # it had some, one of which may have done it


class BecameReady(_OfIncarnation, frozen=True, tag="ready"):
    """It said that it can serve."""


class Beaten(_OfIncarnation, frozen=True, tag="beat"):
    step: int
    phase: str


class SaidFailed(_OfIncarnation, frozen=True, tag="failed"):
    """The process's last words. fits: see `Failed`."""

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


class Spawn(_OfIncarnation, frozen=True, tag="spawn"):
    """Start this process."""


class TellDied(_OfIncarnation, frozen=True, tag="tell_died"):
    """Tell every other process."""


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
