"""`meshlm drain`: take no new requests, let the running ones finish."""

import argparse
import time
from pathlib import Path

from meshlm.supervisor import control
from meshlm.supervisor.cli import status
from meshlm.supervisor.errors import StartError

POLL_S = 0.2


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "drain",
        help="take no new requests, wait for the running ones",
        description="New requests get 503 and /ready says so, until --undo; returns when no request is open.",
    )
    after = parser.add_mutually_exclusive_group()
    after.add_argument("--stop", action="store_true", help="then end the mesh")
    after.add_argument("--undo", action="store_true", help="take requests again")
    parser.add_argument("--timeout", type=float, help="seconds to wait at most; then exit code 1, and still draining")
    status.add_mesh_choice(parser)


def run(arguments: argparse.Namespace) -> int:
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
            raise StartError(
                f"{num_open} requests are still open after {timeout_s:.0f} s; new ones are refused (--undo)"
            )
        time.sleep(POLL_S)
