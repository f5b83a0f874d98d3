"""The last events of a process in a small file that outlives it, kill -9 included: a ring in memory that the file shares.

Each process of a mesh has one in the run directory (ROLE-INDEX.events): its log lines, what it learned of its peers, and its last beat.
The next incarnation keeps the file of the one before (.before). `meshlm logs` follows the rings, `meshlm status --why` shows those of
the dead. Writing costs about two microseconds and waits for nobody. Only the process writes, anybody of its user may read.
"""

import mmap
import os
import struct
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshlm.protocol.wire.ids import Identity

SIZE = 256 << 10
_HEADER = struct.Struct("8sQqq")  # magic, bytes ever written, incarnation, pid
_MAGIC = b"MLMBOX1\n"
_BEAT, HANDS, _DATA = 512, 2048, 4096  # where the last beat, what is in hand (in_hand.py) and the events begin
HANDS_BYTES = _DATA - HANDS
_POSITION = struct.Struct("Q")
_encode = msgspec.json.Encoder(enc_hook=str).encode
SUFFIX, BEFORE = ".events", ".before"


def path_of(run_dir: Path, identity: Identity) -> Path:
    return run_dir / f"{identity.role.value}-{identity.index}{SUFFIX}"


class BlackBox:
    """The writer's side. OSError when there is no room for the file: nothing may fail later, when a page is touched first."""

    def __init__(self, path: Path, incarnation: int) -> None:
        if path.exists():
            path.replace(path.with_name(path.name + BEFORE))
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, _DATA + SIZE)
            self._map = mmap.mmap(file, _DATA + SIZE)
        finally:
            os.close(file)
        self.hands = memoryview(self._map)[HANDS:_DATA]
        self._position = 0
        self._lock = threading.Lock()
        _HEADER.pack_into(self._map, 0, _MAGIC, 0, incarnation, os.getpid())

    def write(self, event: Mapping[str, Any]) -> None:
        """One event, as a line of JSON. One that is longer than a quarter of the ring is cut to its name."""
        line = _encode(event)
        if len(line) > SIZE // 4:
            line = _encode(
                {name: event[name] for name in ("at", "level", "process") if name in event} | {"event": "a long line"}
            )
        line += b"\n"
        with self._lock:
            begin = self._position % SIZE
            first = line[: SIZE - begin]
            self._map[_DATA + begin : _DATA + begin + len(first)] = first
            if rest := line[len(first) :]:
                self._map[_DATA : _DATA + len(rest)] = rest
            self._position += len(line)
            _POSITION.pack_into(self._map, 8, self._position)

    def beat(self, at: float, step: int, phase: str) -> None:
        """What the process does; only the last one is kept."""
        line = _encode({"at": at, "step": step, "phase": phase[:256]})
        self._map[_BEAT : _BEAT + len(line) + 1] = line + b"\n"


def incarnation_in(file: int) -> int:
    """Whose box it is. ValueError for another file."""
    data = os.pread(file, _HEADER.size, 0)
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise ValueError("this is no black box")
    incarnation: int = _HEADER.unpack(data)[2]
    return incarnation


class Contents(NamedTuple):
    """What a ring holds. `position` is where the next read goes on."""

    incarnation: int
    pid: int
    beat: dict[str, Any]
    events: list[dict[str, Any]]
    position: int
    num_missed: int = 0  # bytes that were overwritten before they were read


def read(file: int, since: int = 0) -> Contents:
    """What was written after `since`. A line that the ring has overwritten in part is left out. ValueError for another file."""
    data = os.pread(file, _DATA + SIZE, 0)
    if len(data) < _DATA + SIZE or not data.startswith(_MAGIC):
        raise ValueError("this is no black box")
    _, position, incarnation, pid = _HEADER.unpack_from(data)
    ring = data[_DATA:]
    begin = max(since, position - SIZE, 0)
    here, length = begin % SIZE, position - begin
    text = (ring[here:] + ring[:here])[:length]
    lines = text.split(b"\n")
    if begin > since:
        lines = lines[1:]  # the rest of one
    events = [event for line in lines if line and (event := _object(line)) is not None]
    beat = _object(data[_BEAT:HANDS].partition(b"\n")[0]) or {}
    return Contents(incarnation, pid, beat, events, position, begin - since)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None
    except UnicodeDecodeError:
        return None


def read_file(path: Path) -> Contents:
    """The whole of a ring. OSError, ValueError."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return read(file)
    finally:
        os.close(file)
