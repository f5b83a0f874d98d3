"""Commands that change a running mesh: restart, scale, drain and set."""

import argparse
import json
import sys
import time
from pathlib import Path

import msgspec

from meshlm.protocol.config.changing import CHANGING, known
from meshlm.protocol.wire.ids import Identity
from meshlm.supervisor import control
from meshlm.supervisor.cli import status
from meshlm.supervisor.errors import StartError, UsageError, raised_as
from meshlm.supervisor.settings.sizes import parse_bytes

RESTART_POLL_S, POLL_S = 0.1, 0.2
SIZES = ("max_concurrent_bytes",)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    short = "replace processes one by one, while the mesh serves"
    about = "Replace processes one by one, while the mesh serves. The supervisor itself is not replaced."
    restart = commands.add_parser("restart", help=short, description=about)
    what = "frontend, detokenizer, coordinator, scheduler or worker, all of a role or one; default: all"
    restart.add_argument("what", metavar="ROLE[/INDEX]", nargs="?", default="all", help=what)
    status.add_mesh_choice(restart)
    restart.set_defaults(run=run_restart)

    about = "Add data-parallel ranks to a running mesh or take the last ones out, without losing a request."
    scale = commands.add_parser("scale", help="change the number of ranks of a running mesh", description=about)
    scale.add_argument("-dp", "--dp", "--data-parallel-size", dest="dp", type=int, required=True, help="ranks to have")
    limit = "seconds for the requests that run on a rank that is removed; then they go on elsewhere "
    scale.add_argument("--drain-timeout", type=float, help=f"{limit}(default: the mesh's)")
    scale.add_argument("--no-wait", action="store_true", help="return when the change has begun")
    status.add_mesh_choice(scale)
    scale.set_defaults(run=run_scale)

    about = "New requests get 503 and /ready says so, until --undo; returns when no request is open."
    drain = commands.add_parser("drain", help="take no new requests, wait for the running ones", description=about)
    after = drain.add_mutually_exclusive_group()
    after.add_argument("--stop", action="store_true", help="then end the mesh")
    after.add_argument("--undo", action="store_true", help="take requests again")
    drain.add_argument("--timeout", type=float, help="seconds to wait at most; then exit code 1, and still draining")
    status.add_mesh_choice(drain)
    drain.set_defaults(run=run_drain)

    about = f"Change a setting in all processes of a running mesh, until it ends: {known()}. Without any, print them."
    change = commands.add_parser("set", help="change the log level or limits of a running mesh", description=about)
    change.add_argument("name", nargs="?", help="as the flag of `meshlm serve`, with or without --")
    change.add_argument("value", nargs="?")
    change.add_argument("--json", action="store_true", help="machine-readable")
    status.add_mesh_choice(change)
    change.set_defaults(run=run_set)


def run_restart(arguments: argparse.Namespace) -> int:
    if arguments.what != "all":
        with raised_as(UsageError, ValueError):
            Identity.parse(arguments.what)
    run_dir = status.find(arguments.port, arguments.run_dir)
    control.request(run_dir, {"command": "restart", "what": arguments.what})
    seen, outcome = 0, None
    while outcome is None:
        news = control.request(run_dir, {"command": "restart-news", "from": seen})
        lines, outcome = news["lines"], news["outcome"]
        assert isinstance(lines, list)
        seen += len(lines)
        for line in lines:
            print(line, flush=True)
        if outcome is None:
            time.sleep(RESTART_POLL_S)
    if outcome:
        raise StartError(str(outcome))
    print("done: all are ready")
    return 0


def run_scale(arguments: argparse.Namespace) -> int:
    run_dir = status.find(arguments.port, arguments.run_dir)
    request: dict[str, object] = {"command": "scale", "dp": arguments.dp}
    if arguments.drain_timeout is not None:
        request["drain_s"] = arguments.drain_timeout
    state = msgspec.convert(control.request(run_dir, request), control.MeshStatus)
    if state.scaling:
        print(state.scaling, file=sys.stderr)
        if arguments.no_wait:
            return 0
        state = _finished(run_dir)
    if state.scaling_failed:
        raise StartError(f"scaling failed, {_ranks(state)} as before: {state.scaling_failed}")
    print(_ranks(state))
    return 0


def _finished(run_dir: Path) -> control.MeshStatus:
    """The state when nothing is being changed any more. The mesh's own limits end a change that does not come to an end."""
    while True:
        time.sleep(POLL_S)
        state = msgspec.convert(control.request(run_dir, {"command": "status"}), control.MeshStatus)
        if not state.scaling:
            return state


def _ranks(state: control.MeshStatus) -> str:
    return f"{state.data_parallel_size} rank" + ("s" if state.data_parallel_size > 1 else "")


def run_drain(arguments: argparse.Namespace) -> int:
    run_dir = status.find(arguments.port, arguments.run_dir)
    control.request(run_dir, {"command": "drain", "on": not arguments.undo})
    if arguments.undo:
        print("requests are taken again")
        return 0
    _wait(run_dir, arguments.timeout)
    print("drained: no request is open", flush=True)
    if arguments.stop:
        control.request(run_dir, {"command": "stop"})
        print("the mesh ends")
    return 0


def _wait(run_dir: Path, timeout_s: float | None) -> None:
    """Waits until no request is open, and prints a line for each change."""
    end = time.monotonic() + timeout_s if timeout_s is not None else None
    shown: object = None
    while True:
        num_open = control.request(run_dir, {"command": "drain-state"})["num_open"]
        if num_open == 0:
            return
        if num_open != shown and num_open is not None:
            print(f"draining: {num_open} requests are open", flush=True)
            shown = num_open
        if end is not None and time.monotonic() > end:
            why = f"{num_open} requests are still open after {timeout_s:.0f} s"
            raise StartError(f"{why}; new ones are refused (--undo)")
        time.sleep(POLL_S)


def run_set(arguments: argparse.Namespace) -> int:
    request: dict[str, object] = {"command": "set"}
    if arguments.name is not None:
        name = arguments.name.removeprefix("--").replace("-", "_")
        if name not in CHANGING:
            raise UsageError(f"{arguments.name}: it cannot change while the mesh runs; these can: {known()}")
        if arguments.value is None:
            raise UsageError(f"{arguments.name}: a value is expected")
        with raised_as(UsageError, argparse.ArgumentTypeError, of=arguments.name):
            request["values"] = {name: parse_bytes(arguments.value) if name in SIZES else arguments.value}
    reply = control.request(status.find(arguments.port, arguments.run_dir), request)["settings"]
    assert isinstance(reply, dict)
    if arguments.json:
        json.dump(reply, sys.stdout, indent=2)
        print()
    else:
        for name, value in reply.items():
            print(f"{name.replace('_', '-'):<26}{value}")
    return 0
