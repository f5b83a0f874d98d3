"""`meshlm scale`: add ranks to a running mesh, or take some out."""

import argparse
import sys
import time
from pathlib import Path

import msgspec

from meshlm.supervisor import control
from meshlm.supervisor.cli import status
from meshlm.supervisor.errors import StartError

POLL_S = 0.2


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "scale",
        help="change the number of ranks of a running mesh",
        description="Add data-parallel ranks to a running mesh or take the last ones out, without losing a request.",
    )
    parser.add_argument("-dp", "--dp", "--data-parallel-size", dest="dp", type=int, required=True, help="ranks to have")
    parser.add_argument(
        "--drain-timeout",
        type=float,
        help="seconds for the requests that run on a rank that is removed; then they go on elsewhere (default: the mesh's)",
    )
    parser.add_argument("--no-wait", action="store_true", help="return when the change has begun")
    status.add_mesh_choice(parser)


def run(arguments: argparse.Namespace) -> int:
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
