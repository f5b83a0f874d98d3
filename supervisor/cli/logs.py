"""`meshlm logs [ROLE[/INDEX]]`: the last log lines of a running mesh's processes on this host, and those that follow."""

import argparse
import heapq
import json
import time
from pathlib import Path

from meshlm.protocol.config.log_levels import LEVELS
from meshlm.supervisor.cli import events, status
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.processes.rundir import STATUS_SOCKET

POLL_S = 0.2


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "logs",
        help="show and follow the logs of a running mesh",
        description="Show the last log lines of the processes on this host, in order of time, with what they learned of each other.",
    )
    parser.add_argument("what", metavar="ROLE[/INDEX]", nargs="?", default="", help="these processes alone")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the mesh ends or Ctrl-C")
    parser.add_argument("-n", "--lines", type=int, default=100, help="lines of the past (default 100)")
    parser.add_argument("--level", choices=LEVELS, default="info", help="from this level on (default info)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    status.add_mesh_choice(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.what and not events.is_process(arguments.what):
        raise UsageError(f"{arguments.what}: no such process; `worker` and `worker/0` are of the form that is expected")
    if arguments.lines < 0:
        raise UsageError("--lines: 0 or more")
    run_dir = status.find(arguments.port, arguments.run_dir)
    reader = _Reader(run_dir, arguments.what, arguments.level)
    past = reader.new()
    _show(past[max(0, len(past) - arguments.lines) :], arguments.json)
    while arguments.follow and (run_dir / STATUS_SOCKET).exists():
        time.sleep(POLL_S)
        _show(reader.new(), arguments.json)
    return 0


class _Reader:
    """The events of all processes that are wanted, in order of time."""

    def __init__(self, run_dir: Path, wanted: str, level: str) -> None:
        self._run_dir, self._wanted, self._least = run_dir, wanted, LEVELS.index(level)
        self._followers: dict[Path, events.Follower] = {}

    def new(self) -> list[events.Event]:
        for path in events.boxes(self._run_dir, self._wanted):
            self._followers.setdefault(path, events.Follower(path))
        each = [sorted(follower.new(), key=_at) for follower in self._followers.values()]
        return [event for event in heapq.merge(*each, key=_at) if self._shown(event)]

    def _shown(self, event: events.Event) -> bool:
        level = str(event.get("level", "info"))
        return (LEVELS.index(level) if level in LEVELS else len(LEVELS)) >= self._least


def _at(event: events.Event) -> float:
    return float(event.get("at", 0.0))


def _show(found: list[events.Event], as_json: bool) -> None:
    for event in found:
        print(json.dumps(event) if as_json else events.line_of(event), flush=True)
