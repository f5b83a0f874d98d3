"""The black boxes of a run directory (runtime/process/black_box.py), read and printed: for `meshlm logs` and `meshlm status --why`."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshlm.protocol.wire.ids import Role
from meshlm.runtime.process import black_box
from meshlm.runtime.process.black_box import BEFORE, SUFFIX, Contents
from meshlm.runtime.process.readable import readable

Event = dict[str, Any]
SHOWN = 12  # events of a dead process
_OWN_PLACE = ("at", "event", "level", "process", "timestamp")


class Death(NamedTuple):
    """A process that is gone, by the file that it left."""

    process: str
    contents: Contents
    ended_at: float  # its last sign of life


def name_of(path: Path) -> str:
    """worker-0.events -> worker/0."""
    role, _, index = path.name.removesuffix(BEFORE).removesuffix(SUFFIX).rpartition("-")
    return f"{role}/{index}"


def boxes(run_dir: Path, wanted: str, *, before: bool = False) -> list[Path]:
    """The files of the processes that `wanted` names ("", a role, or role/index): those that live, or their predecessors'."""
    found = sorted(run_dir.glob(f"*{SUFFIX}{BEFORE}" if before else f"*{SUFFIX}"))
    return [path for path in found if wanted in ("", name_of(path), name_of(path).partition("/")[0])]


def is_process(wanted: str) -> bool:
    """Whether a process may be called so."""
    role, slash, index = wanted.partition("/")
    return role in {role.value for role in Role} and (not slash or index.isdecimal())


def line_of(event: Event, *, date: bool = False) -> str:
    """One line for people."""
    at = event.get("at", 0.0)
    clock = (
        time.strftime("%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S", time.localtime(at)) + f".{int(at % 1 * 1000):03d}"
    )
    fields = " ".join(
        f"{name}={value}" for name, value in event.items() if name not in _OWN_PLACE and value is not None
    )
    text = f"{clock} {event.get('process', ''):<14} {event.get('level', ''):<7} {event.get('event', '')}"
    return "\n".join(readable(line) for line in f"{text} {fields}".rstrip().split("\n"))


class Follower:
    """The events of one process as they come, also those of its next incarnations."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._position = self._inode = 0

    def new(self) -> Iterator[Event]:
        """What was written since the last call."""
        if self._file < 0 and not self._open():
            return
        yield from self._rest()
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino != self._inode:  # the next incarnation's
                yield from self._rest()
                self.close()
                if self._open():
                    yield from self._rest()

    def _open(self) -> bool:
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        self._position, self._inode = 0, os.fstat(self._file).st_ino
        return True

    def _rest(self) -> Iterator[Event]:
        try:
            found = black_box.read(self._file, self._position)
        except ValueError:  # it is just being made
            return
        if found.num_missed and self._position:
            at = found.events[0].get("at", 0.0) if found.events else time.time()
            text = f"{found.num_missed} bytes of events were overwritten before they were read"
            yield {"at": at, "process": name_of(self._path), "level": "warning", "event": text}
        self._position = found.position
        for event in found.events:
            yield {"process": name_of(self._path), **event}

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def deaths(run_dir: Path, *, is_over: bool) -> list[Death]:
    """The last process that ended of each place, and, of a mesh that is over, all of its processes; the newest first."""
    found = []
    for path in (*boxes(run_dir, "", before=True), *(boxes(run_dir, "") if is_over else ())):
        with contextlib.suppress(OSError, ValueError):
            contents = black_box.read_file(path)
            last = max([contents.beat.get("at", 0.0), *(event.get("at", 0.0) for event in contents.events)])
            found.append(Death(name_of(path), contents, last))
    return sorted(found, key=lambda death: -death.ended_at)


def show_death(death: Death, why: str) -> Iterator[str]:
    """Lines for people: how it ended, what it did then, and its last events."""
    contents = death.contents
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(death.ended_at))
    yield readable(f"{death.process}, pid {contents.pid}: {why or 'ended'}; last sign of life {when}")
    if contents.beat:
        yield readable(f"    was: {contents.beat.get('phase') or '-'}, step {contents.beat.get('step', 0)}")
    for event in contents.events[-SHOWN:]:
        yield from (f"    {line}" for line in line_of(event).split("\n"))
