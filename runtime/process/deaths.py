"""Counts the deaths that a request met since its last token, to tell when they are its own doing. Pure.

A request that kills whoever has it must be given up before the supervisor gives up the mesh, which it does at more than
`--max-restarts` deaths of one process within WINDOW_S (`allowed`). One that only waits meets deaths too, and is to outlive them: so
old deaths are forgotten, and one role's do not add to another's. Called by whoever places requests again: the frontend (and `LLM` in
its place) for the deaths of detokenizers, the detokenizer for those of schedulers and the coordinator.

Where it is known what a process had in hand when it died (runtime/process/in_hand.py), that alone is blamed, at the second death;
what was only there goes on.
"""

from typing import NamedTuple

from meshlm.protocol.wire.ids import Role

WINDOW_S = 60.0  # the supervisor's (group/core.py)
MAX_DEATHS = 5  # of one role within WINDOW_S; the default of --max-restarts
LONG_S = 3600.0
MAX_IN_HAND = 2  # of processes that worked on that very request then: the first may be anybody's doing
MAX_SLOW_DEATHS = 20  # of all roles within LONG_S: of one that takes long to kill, and would do so for ever


class Death(NamedTuple):
    role: Role
    at: float


def allowed(max_restarts: int, usual: int = MAX_DEATHS) -> int:
    """Deaths at which a request is given up: no more than the mesh survives, but never the first: that may be anybody's doing."""
    return min(usual, max(2, max_restarts))


def one_more(before: tuple[Death, ...], role: Role, now: float) -> tuple[Death, ...]:
    """The deaths that count after another one."""
    return (*(death for death in before if now - death.at < LONG_S), Death(role, now))


def too_many(deaths: tuple[Death, ...], most: int = MAX_DEATHS) -> str:
    """Why a request is given up that met these; "" when it is not. most: within WINDOW_S, see `allowed`."""
    if not deaths:
        return ""
    last = deaths[-1]
    recent = sum(death.role is last.role and last.at - death.at < WINDOW_S for death in deaths)
    if recent >= most:
        return f"given up: its {last.role.value} died {recent} times within {WINDOW_S:.0f} s, each time before the next token"
    if len(deaths) >= MAX_SLOW_DEATHS:
        count = len(deaths)
        return f"given up after {count} deaths of processes that had it within an hour, each before the next token"
    return ""


def poison(role: Role, num_in_hand: int) -> str:
    """Why a request is refused that so many processes, the last of this role, had in hand when they died; "" when it is not."""
    if num_in_hand < MAX_IN_HAND:
        return ""
    last = role.value
    return f"refused: processes died {num_in_hand} times while they worked on this request, the last time its {last}"


# How long a request waits for a process that is away, of whatever role: a rank whose workers load, or any detokenizer.
NEW_S = 60.0  # one of which its client has nothing yet
BEGUN_S = 600.0  # one whose client reads already: a large model loads for minutes
