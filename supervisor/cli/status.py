"""`meshlm status` and `meshlm logs`: the processes of this user's running mesh, and what they logged.

Log lines are read from the black boxes of the run directory (runtime/process/black_box.py), also those of processes that died.
"""

import argparse
import contextlib
import heapq
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshlm.protocol.config.log_levels import LEVELS
from meshlm.protocol.wire.ids import Role
from meshlm.runtime.process import black_box
from meshlm.runtime.process.black_box import BEFORE, SUFFIX, Contents
from meshlm.runtime.process.readable import readable
from meshlm.supervisor import control
from meshlm.supervisor.errors import StartError, UsageError
from meshlm.supervisor.processes import rundir
from meshlm.supervisor.processes.rundir import STATUS_SOCKET


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    status = commands.add_parser("status", help="show the processes of a running mesh")
    status.add_argument("--json", action="store_true", help="machine-readable")
    why = "show the last events of processes that died, also of a mesh that is gone"
    status.add_argument("--why", action="store_true", help=why)
    add_mesh_choice(status)
    status.set_defaults(run=run_status)

    about = "Show the last log lines of the processes on this host, in order of time, with what they learned of others."
    logs = commands.add_parser("logs", help="show and follow the logs of a running mesh", description=about)
    logs.add_argument("what", metavar="ROLE[/INDEX]", nargs="?", default="", help="these processes alone")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the mesh ends or Ctrl-C")
    logs.add_argument("-n", "--lines", type=int, default=100, help="lines of the past (default 100)")
    logs.add_argument("--level", choices=LEVELS, default="info", help="from this level on (default info)")
    logs.add_argument("--json", action="store_true", help="one JSON object a line")
    add_mesh_choice(logs)
    logs.set_defaults(run=run_logs)


def add_mesh_choice(parser: argparse.ArgumentParser) -> None:
    """The flags that say which running mesh is meant."""
    parser.add_argument("--port", type=int, help="of the mesh, where several run")
    parser.add_argument("--run-dir", help="of the mesh, where it was started with one")


def run_status(arguments: argparse.Namespace) -> int:
    if arguments.why:
        return _why(arguments.port, arguments.run_dir)
    found = find(arguments.port, arguments.run_dir)
    reply = control.request(found, {"command": "status"})
    status = msgspec.convert(reply, control.MeshStatus)
    if arguments.json:
        json.dump(reply, sys.stdout, indent=2)
        print()
    else:
        show(status)
    return 0


def find(port: int | None, run_dir: str | None, *, or_root: bool = True) -> Path:
    """The run directory of the mesh that is meant: the only one that answers, or the one of this port. `or_root`: as root, another
    user's too."""
    if run_dir:
        rundir.check_private(Path(run_dir), or_root=or_root)
        return Path(run_dir)
    alive: dict[int, Path] = {}
    for path in rundir.running(rundir.base_dir(os.environ)):
        try:
            alive[msgspec.convert(control.request(path, {"command": "status"}), control.MeshStatus).port] = path
        except (StartError, msgspec.ValidationError):
            continue  # a mesh that was killed leaves its socket behind
    if port is not None:
        if port not in alive:
            raise UsageError(f"--port {port}: no mesh of yours runs there; running: {_ports(alive)}")
        return alive[port]
    if not alive:
        raise StartError("no mesh of yours is running; start one with `meshlm serve`")
    if len(alive) > 1:
        raise UsageError(f"several meshes run; choose with --port: {_ports(alive)}")
    return next(iter(alive.values()))


def _ports(alive: dict[int, Path]) -> str:
    return ", ".join(str(port) for port in sorted(alive)) or "none"


def _why(port: int | None, run_dir: str | None) -> int:
    """Print what is known of processes that died: of this mesh, or of one that was killed and left its files."""
    status: control.MeshStatus | None = None
    try:
        found = find(port, run_dir)
        status = msgspec.convert(control.request(found, {"command": "status"}), control.MeshStatus)
    except StartError:
        found = Path(run_dir) if run_dir else _left_behind(port)
    why = {f"{row.role}/{row.index}": row.last_end for row in status.processes} if status is not None else {}
    dead = deaths(found, is_over=status is None)
    if status is not None:
        show(status)
    else:
        print(f"no mesh runs in {found}; these are its last events")
    for death in dead:
        print()
        print("\n".join(show_death(death, why.get(death.process, ""))))
    if not dead:
        print("no process has died since the mesh was started")
    return 0


def _left_behind(port: int | None) -> Path:
    """The run directory that a mesh of this port has left, or the newest. StartError."""
    base = rundir.base_dir(os.environ)
    left = [path for path in rundir.left(base) if port is None or path.name == str(port)]
    if not left:
        raise StartError("no mesh of yours is running, and none has left its last events")
    return max(left, key=lambda path: path.stat().st_mtime)


def show(status: control.MeshStatus) -> None:
    """Print a table for people: names and pids are copied from here, so no cell is cut or wrapped."""
    ranks = f", {status.data_parallel_size} ranks" if status.data_parallel_size > 1 else ""
    ranks += f" ({status.dp_roles})" if status.dp_roles else ""
    lacks = f": no node has {status.missing}" if status.missing else ""
    state = f" ({status.scaling})" if status.scaling else "" if status.ready else f" (not ready{lacks})"
    where = f"on port {status.port}" if status.port else "on a node without HTTP"
    print(readable(f"{status.model} {where}{ranks}{state}"))
    rows = [["process", "host", "state", "pid", "uptime", "restarts", "memory", "doing"]]
    for process in status.processes:
        cells = [f"{process.role}/{process.index}", process.host, process.state, str(process.pid or "-")]
        cells += [f"{process.uptime_s:.0f} s", str(process.restarts), _memory(process.rss_bytes), process.phase]
        rows.append(cells)
    for standby in status.standbys:
        cells = [standby.role, standby.host, standby.state, str(standby.pid), f"{standby.uptime_s:.0f} s", "-"]
        rows.append([*cells, _memory(standby.rss_bytes), "waits for a place" if standby.state == "standby" else ""])
    if not any(process.host for process in status.processes):
        rows = [[cells[0], *cells[2:]] for cells in rows]
    rows = [[readable(cell) for cell in cells] for cells in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    pads = [str.rjust if name in ("pid", "uptime", "restarts", "memory") else str.ljust for name in rows[0]]
    for cells in rows:
        print("  ".join(pad(cell, width) for pad, cell, width in zip(pads, cells, widths)).rstrip())


def _memory(rss_bytes: int) -> str:
    return f"{rss_bytes / 1e6:.0f} MB" if rss_bytes else "-"


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
    role, slash, index = wanted.partition("/")
    return role in {role.value for role in Role} and (not slash or index.isdecimal())


def line_of(event: Event) -> str:
    at = event.get("at", 0.0)
    clock = f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at % 1 * 1000):03d}"
    others = {name: value for name, value in event.items() if name not in _OWN_PLACE and value is not None}
    fields = " ".join(f"{name}={value}" for name, value in others.items())
    text = f"{clock} {event.get('process', ''):<14} {event.get('level', ''):<7} {event.get('event', '')}"
    return "\n".join(readable(line) for line in f"{text} {fields}".rstrip().split("\n"))


class Follower:
    """The events of one process as they come, also those of its next incarnations."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1
        self._position = self._inode = 0

    def new(self) -> Iterator[Event]:
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


POLL_S = 0.2


def run_logs(arguments: argparse.Namespace) -> int:
    if arguments.what and not is_process(arguments.what):
        raise UsageError(f"{arguments.what}: no such process; `worker` and `worker/0` are of the form that is expected")
    if arguments.lines < 0:
        raise UsageError("--lines: 0 or more")
    run_dir = find(arguments.port, arguments.run_dir)
    reader = _Reader(run_dir, arguments.what, arguments.level)
    past = reader.new()
    _print_events(past[max(0, len(past) - arguments.lines) :], arguments.json)
    while arguments.follow and (run_dir / STATUS_SOCKET).exists():
        time.sleep(POLL_S)
        _print_events(reader.new(), arguments.json)
    return 0


class _Reader:
    """The events of all processes that are wanted, in order of time."""

    def __init__(self, run_dir: Path, wanted: str, level: str) -> None:
        self._run_dir, self._wanted, self._least = run_dir, wanted, LEVELS.index(level)
        self._followers: dict[Path, Follower] = {}

    def new(self) -> list[Event]:
        for path in boxes(self._run_dir, self._wanted):
            self._followers.setdefault(path, Follower(path))
        each = [sorted(follower.new(), key=_at) for follower in self._followers.values()]
        return [event for event in heapq.merge(*each, key=_at) if self._shown(event)]

    def _shown(self, event: Event) -> bool:
        level = str(event.get("level", "info"))
        return (LEVELS.index(level) if level in LEVELS else len(LEVELS)) >= self._least


def _at(event: Event) -> float:
    return float(event.get("at", 0.0))


def _print_events(found: list[Event], as_json: bool) -> None:
    for event in found:
        print(json.dumps(event) if as_json else line_of(event), flush=True)
