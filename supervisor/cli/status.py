"""`meshlm status`: the processes of this user's running mesh."""

import argparse
import json
import os
import sys
from pathlib import Path

import msgspec

from meshlm.runtime.process.readable import readable
from meshlm.supervisor import control
from meshlm.supervisor.cli import events
from meshlm.supervisor.errors import StartError, UsageError
from meshlm.supervisor.processes import rundir


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("status", help="show the processes of a running mesh")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument(
        "--why", action="store_true", help="show the last events of processes that died, also of a mesh that is gone"
    )
    add_mesh_choice(parser)


def add_mesh_choice(parser: argparse.ArgumentParser) -> None:
    """The flags that say which running mesh is meant."""
    parser.add_argument("--port", type=int, help="of the mesh, where several run")
    parser.add_argument("--run-dir", help="of the mesh, where it was started with one")


def run(arguments: argparse.Namespace) -> int:
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
    dead = events.deaths(found, is_over=status is None)
    if status is not None:
        show(status)
    else:
        print(f"no mesh runs in {found}; these are its last events")
    for death in dead:
        print()
        print("\n".join(events.show_death(death, why.get(death.process, ""))))
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
    right = {
        column_index
        for column_index, heading in enumerate(rows[0])
        if heading in ("pid", "uptime", "restarts", "memory")
    }
    for cells in rows:
        padded = (
            c.rjust(w) if column_index in right else c.ljust(w)
            for column_index, (c, w) in enumerate(zip(cells, widths))
        )
        print("  ".join(padded).rstrip())


def _memory(rss_bytes: int) -> str:
    return f"{rss_bytes / 1e6:.0f} MB" if rss_bytes else "-"
