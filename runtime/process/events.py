"""The events that every process tells its core, of its links and its clock, and Send, the effect that all cores have.

`check_transition` looks into the table of states that each process has, with an essay above it.
A core adds events and effects of its own beside these (detokenizer/events.py, say), and answers with them (handle(event, now)).
"""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TypeVar

from msgspec import Struct

from meshlm.protocol.wire.ids import Identity, Incarnation


class Received(Struct, frozen=True):
    """A message of a peer."""

    sender: Identity
    incarnation: Incarnation
    message: Struct


class PeerUp(Struct, frozen=True):
    """A session with this incarnation of a peer begins."""

    identity: Identity
    incarnation: Incarnation


class PeerLost(Struct, frozen=True):
    """This incarnation of a peer is over."""

    identity: Identity
    incarnation: Incarnation
    in_hand: tuple[str, ...] = ()  # the requests that it died with in hand, as far as it is known


class Tick(Struct, frozen=True):
    """It comes once a second; `wall_s` is the wall clock, for deadlines."""

    wall_s: float


Event = Received | PeerUp | PeerLost | Tick


class Send(Struct, frozen=True):
    """Send `message` to `to`."""

    to: Identity
    message: Struct


State = TypeVar("State", bound=Enum)


class InvalidTransition(Exception):
    """A bug: the text tells the story."""


def check_transition(
    table: Mapping[State, tuple[State, ...]], before: State, after: State, name: str, story: Iterable[str] = ()
) -> None:
    """InvalidTransition where the table does not let `after` follow `before`."""
    if after not in table[before]:
        told = f"; so far: {', '.join(story)}" if story else ""
        raise InvalidTransition(f"{name}: {before.value} -> {after.value}{told}")
