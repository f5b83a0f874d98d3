"""One line of the doctor's: what was looked at, what was found, and what to do about it."""

import enum
from collections.abc import Iterable

from msgspec import Struct


class State(enum.Enum):
    """How bad it is. FAILED: a mesh will not start, or not work, like this."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


class Finding(Struct, frozen=True):
    """`name` is short and stays the same, for scripts. `advice` is what to do, "" where there is nothing."""

    name: str
    state: State
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Finding:
    return Finding(name, State.OK, found)


def warning(name: str, found: str, advice: str) -> Finding:
    return Finding(name, State.WARNING, found, advice)


def failed(name: str, found: str, advice: str) -> Finding:
    return Finding(name, State.FAILED, found, advice)


def skipped(name: str, found: str) -> Finding:
    return Finding(name, State.SKIPPED, found)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 where something failed; warnings are no failures."""
    return int(any(one.state is State.FAILED for one in findings))
