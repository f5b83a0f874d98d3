"""`meshlm doctor`: whether this machine can run a mesh, and what to do where it cannot."""

import argparse
import sys
from collections.abc import Sequence

import msgspec

from meshlm.runtime.process.readable import readable
from meshlm.supervisor.cli import serve
from meshlm.supervisor.doctor import gpus, host, settings
from meshlm.supervisor.doctor.findings import Finding, State, exit_code
from meshlm.supervisor.settings import flags

MARKS = {State.OK: "ok", State.WARNING: "WARN", State.FAILED: "FAIL", State.SKIPPED: "-"}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    about = (
        "Check the GPUs, drivers, libraries, limits, keys and folders that `meshlm serve` with the same flags would use. "
        "Exit code 1 where something would not work; warnings are no failures."
    )
    parser = commands.add_parser("doctor", help="check this machine, and say what to do", description=about)
    flags.add_flags(parser, from_file=True)
    parser.add_argument("--json", action="store_true", help="machine-readable")
    without = "do not have processes talk over torch.distributed"
    parser.add_argument("--no-communication", action="store_true", help=without)


def run(arguments: argparse.Namespace) -> int:
    config = serve.config_of(arguments)
    found = host.findings()
    of_gpus, num_gpus = gpus.findings()
    found += of_gpus
    if not arguments.no_communication:
        found.append(gpus.communication(num_gpus))
    found += settings.findings(config)
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    else:
        show(found)
    return exit_code(found)


def show(found: Sequence[Finding]) -> None:
    """Print one line for each, and the advice below it."""
    width = max(len(one.name) for one in found)
    for one in found:
        print(f"{MARKS[one.state]:<4}  {one.name:<{width}}  {readable(one.found)}")
        if one.advice:
            print(f"{'':<{width + 6}}  -> {one.advice}")
    counts = {state: sum(one.state is state for one in found) for state in (State.FAILED, State.WARNING)}
    print(f"{counts[State.FAILED]} failed, {counts[State.WARNING]} warnings")
