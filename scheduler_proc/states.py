"""Everything that a rank and its requests can be stands here: what each state means, and what may follow it.

A rank has a *session* with its workers, and a *planning* state that an operator sets. They are independent of each other.

The session begins in GATHERING: a worker cannot be reached yet, or the coordinator has not said how the workers of an earlier
incarnation of this scheduler were left (--enable-sleep-mode). Once all can be reached they are sent a Reset, and the session is
PREPARING: nobody may be sent a plan before all have answered. When the last one says that it can step, the rank is SERVING. When all
have answered and some are without memory, as an operator wants it, the rank is ASLEEP: they can only be woken up, which is a
new session. When all can step and some have other weights than the mesh, which cannot be read any more, the rank is BEHIND: it is sent
no plan, tries again now and then, and can be given other weights.

A new session begins too when a step failed, when the ranks of a group get other members, and when a worker returns.
Whenever a worker is lost, and when workers turn out to have been sent different plans, the session is GATHERING again. With a session
its plans end, and all that its workers held: the running requests are preempted, and what is on its way is for nobody.

Planning is RUNNING until an operator pauses the rank. A rank that is DRAINING computes what has begun to its end, and begins nothing.
A rank that is PAUSED plans no step at all, or empty ones where others
need them (lockstep.py). Both go on with Resume, and one may follow the other. A rank that is STOPPED never plans
again: its mesh ends. None of these states ends a session, and none is ended by one.

A request is WAITING until the planner gives it a row and blocks; then it is RUNNING, whether its prompt or its output is computed. When
others need its memory, or the workers lose it, it is PREEMPTED: it waits again with the tokens that it has. Every state may be left for
FINISHED, once, and FINISHED for none. Others may pass one that waits while there is a `Wait`: steps that it was in have not ended yet,
so that its tokens are not all known; or its workers have not prepared its extras (a grammar); or KV of its tokens is looked for or
loaded (connectors/load.py).
"""

from enum import Enum

from meshlm.runtime.process.events import check_transition


class Session(Enum):
    """The session of a scheduler with its workers."""

    GATHERING = "waiting for its workers"
    PREPARING = "its workers prepare"
    SERVING = "serving"
    ASLEEP = "its workers sleep"
    BEHIND = "its workers have other weights"


class Planning(Enum):
    """The operator's wish for the plans of a rank."""

    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"
    STOPPED = "stopped"


class RequestState(Enum):
    """A request of this rank."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Wait(Enum):
    """The reason for which others may pass a request that is WAITING or PREEMPTED."""

    RESULTS = "results"
    EXTRAS = "extras"
    KV = "kv"


State = Session | Planning | RequestState
TRANSITIONS: dict[State, tuple[State, ...]] = {
    Session.GATHERING: (Session.GATHERING, Session.PREPARING),
    Session.PREPARING: (Session.GATHERING, Session.PREPARING, Session.SERVING, Session.ASLEEP, Session.BEHIND),
    Session.SERVING: (Session.GATHERING, Session.PREPARING),
    Session.ASLEEP: (Session.GATHERING, Session.PREPARING),
    Session.BEHIND: (Session.GATHERING, Session.PREPARING),
    Planning.RUNNING: (Planning.RUNNING, Planning.DRAINING, Planning.PAUSED, Planning.STOPPED),
    Planning.DRAINING: (Planning.RUNNING, Planning.DRAINING, Planning.PAUSED, Planning.STOPPED),
    Planning.PAUSED: (Planning.RUNNING, Planning.DRAINING, Planning.PAUSED, Planning.STOPPED),
    Planning.STOPPED: (Planning.STOPPED,),
    RequestState.WAITING: (RequestState.RUNNING, RequestState.FINISHED),
    RequestState.RUNNING: (RequestState.PREEMPTED, RequestState.FINISHED),
    RequestState.PREEMPTED: (RequestState.RUNNING, RequestState.FINISHED),
    RequestState.FINISHED: (),
}


class RankState:
    """The states of one rank. The workers' session changes the one, operations change the other; planner and reports read both."""

    __slots__ = ("planning", "session")

    def __init__(self) -> None:
        self.session, self.planning = Session.GATHERING, Planning.RUNNING

    def move_session(self, session: Session) -> None:
        check_transition(TRANSITIONS, self.session, session, "the session")
        self.session = session

    def move_planning(self, planning: Planning) -> None:
        """An operator's wish, which changes nothing for a rank that is stopped."""
        if self.planning is not Planning.STOPPED:
            check_transition(TRANSITIONS, self.planning, planning, "planning")
            self.planning = planning

    @property
    def serves(self) -> bool:
        return self.session is Session.SERVING

    @property
    def plans(self) -> bool:
        return self.serves and self.planning in (Planning.RUNNING, Planning.DRAINING)

    @property
    def drains(self) -> bool:
        """Whether only requests that have begun may run."""
        return self.planning is Planning.DRAINING

    @property
    def rests(self) -> bool:
        """Whether no request may run. A rank that steps with others takes part in their steps with nothing of its own."""
        return self.planning is Planning.PAUSED

    @property
    def paused(self) -> bool:
        """Whether an operator has it begin no request."""
        return self.planning in (Planning.DRAINING, Planning.PAUSED)
