"""Tables of states: which state may follow which. Each process has its own table, with an essay above it; this looks into it."""

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TypeVar

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
