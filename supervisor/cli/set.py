"""`meshlm set NAME VALUE`: change the log level or a limit of a running mesh."""

import argparse
import json
import sys

from meshlm.protocol.config.changing import CHANGING, known
from meshlm.supervisor import control
from meshlm.supervisor.cli import status
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings.sizes import parse_bytes

SIZES = ("max_concurrent_bytes",)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "set",
        help="change the log level or limits of a running mesh",
        description=f"Change a setting in all processes of a running mesh, until it ends: {known()}. Without any, print them.",
    )
    parser.add_argument("name", nargs="?", help="as the flag of `meshlm serve`, with or without --")
    parser.add_argument("value", nargs="?")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    status.add_mesh_choice(parser)


def run(arguments: argparse.Namespace) -> int:
    request: dict[str, object] = {"command": "set"}
    if arguments.name is not None:
        name = arguments.name.removeprefix("--").replace("-", "_")
        if name not in CHANGING:
            raise UsageError(f"{arguments.name}: it cannot change while the mesh runs; these can: {known()}")
        if arguments.value is None:
            raise UsageError(f"{arguments.name}: a value is expected")
        try:
            request["values"] = {name: parse_bytes(arguments.value) if name in SIZES else arguments.value}
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"{arguments.name}: {error}") from None
    reply = control.request(status.find(arguments.port, arguments.run_dir), request)["settings"]
    assert isinstance(reply, dict)
    if arguments.json:
        json.dump(reply, sys.stdout, indent=2)
        print()
    else:
        for name, value in reply.items():
            print(f"{name.replace('_', '-'):<26}{value}")
    return 0
