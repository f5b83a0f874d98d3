"""`meshlm top`: the dashboard in a terminal, drawn anew each second."""

import argparse
import sys
import time
from collections.abc import Iterator

import msgspec

from meshlm.protocol.dashboard import History, NewsView, Snapshot
from meshlm.runtime.extras import how_to_install
from meshlm.supervisor.cli import terminal
from meshlm.supervisor.errors import StartError, UsageError

SILENCE_S = 10.0  # of a server that sends an event each second
AGAIN_S = 1.0
RATES_S = 2.0  # what rates cover
LEAST_S, MOST_S = 0.1, 5.0  # between events, as GET /dashboard/events takes them
NEEDS_RICH = f"meshlm top needs rich: {how_to_install('top')}"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("top", help="show a running server in the terminal: processes, rates, requests")
    terminal.add_server(parser)
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two drawings (1)")
    parser.add_argument("--once", action="store_true", help="show it once and end; so it is where no terminal is")


def run(arguments: argparse.Namespace) -> int:
    if not LEAST_S <= arguments.every <= MOST_S:
        raise UsageError(f"--every {arguments.every:g}: seconds from {LEAST_S:g} to {MOST_S:g}")
    try:
        from rich.console import Console

        from meshlm.supervisor.cli.top_view import Screen
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        raise StartError(NEEDS_RICH) from None

    server = terminal.server_of(arguments)
    server = server._replace(base=server.base.removesuffix("/v1"))
    console = Console()
    if arguments.once or not sys.stdout.isatty():
        screen = Screen(console, str(server))
        screen.add(_history(server))
        screen.show(_first(server))
        return 0
    with Screen(console, str(server)) as screen:
        while True:
            try:
                screen.add(_history(server))
                for snapshot in snapshots(server, arguments.every):
                    screen.draw(snapshot)
            except StartError as error:
                if not screen.has_drawn:
                    raise
                screen.lost(str(error))  # the frontend may have been killed, and is started again
            time.sleep(AGAIN_S)


def _history(server: terminal.Server) -> tuple[NewsView, ...]:
    with server.request("GET", "/dashboard/history", timeout_s=SILENCE_S) as response:
        return msgspec.json.decode(response.read(), type=History).news


def _first(server: terminal.Server) -> Snapshot:
    """The event after two seconds, since rates need figures of two seconds. StartError."""
    found, begun = snapshots(server, LEAST_S), time.monotonic()
    last = None
    for snapshot in found:
        last = snapshot
        if time.monotonic() - begun >= RATES_S:
            break
    if last is None:
        raise StartError(f"{server}: the events have ended")
    return last


def snapshots(server: terminal.Server, every_s: float) -> Iterator[Snapshot]:
    """The events of the dashboard. StartError, also for a server that is none of ours."""
    decode = msgspec.json.Decoder(Snapshot).decode
    with server.request("GET", f"/dashboard/events?every={every_s:g}", timeout_s=SILENCE_S) as response:
        for line in response:
            if line.startswith(b"data: "):
                yield decode(line[6:])
