"""`meshlm restart ROLE[/INDEX]`: replace processes of a running mesh, one after the other, while it serves."""

import argparse
import time

from meshlm.protocol.wire.ids import Identity
from meshlm.supervisor import control
from meshlm.supervisor.cli import status
from meshlm.supervisor.errors import StartError, UsageError

POLL_S = 0.1


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "restart",
        help="replace processes one by one, while the mesh serves",
        description="Replace processes one by one, while the mesh serves. The supervisor itself is not replaced.",
    )
    parser.add_argument(
        "what",
        metavar="ROLE[/INDEX]",
        nargs="?",
        default="all",
        help="frontend, detokenizer, coordinator, scheduler or worker, all of a role or one; default: all",
    )
    status.add_mesh_choice(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.what != "all":
        try:
            Identity.parse(arguments.what)
        except ValueError as error:
            raise UsageError(str(error)) from None
    run_dir = status.find(arguments.port, arguments.run_dir)
    control.request(run_dir, {"command": "restart", "what": arguments.what})
    seen = 0
    while True:
        news = control.request(run_dir, {"command": "restart-news", "from": seen})
        lines, outcome = news["lines"], news["outcome"]
        assert isinstance(lines, list)
        seen += len(lines)
        for line in lines:
            print(line, flush=True)
        if outcome is not None:
            break
        time.sleep(POLL_S)
    if outcome:
        raise StartError(str(outcome))
    print("done: all are ready")
    return 0
