"""What the kernel tells of a process, in /proc."""

from pathlib import Path
from typing import NamedTuple


class ProcStat(NamedTuple):
    state: str  # a letter: T stopped, Z ended and not yet reaped
    start_ticks: int  # since the machine was started: with the pid it is the process's alone


def of(pid: int) -> ProcStat | None:
    """None where there is no such process."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return ProcStat(words[0], int(words[19])) if len(words) > 19 else None


def runs(pid: int, start_ticks: int) -> bool:
    """Whether this very process is there, and has not ended."""
    found = of(pid) if pid else None
    return found is not None and found.start_ticks == start_ticks and found.state not in "ZX"
