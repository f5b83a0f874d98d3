"""`meshlm complete`: let a running server go on with texts from the terminal."""

import argparse

from meshlm.supervisor.cli import terminal


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("complete", help="complete texts with a running server")
    terminal.add_flags(parser)
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="complete this once and end")


def run(arguments: argparse.Namespace) -> int:
    server = terminal.server_of(arguments)
    model = terminal.model_of(server, arguments)
    for text in terminal.prompts(arguments.quick):
        body = {"model": model, "prompt": text}
        terminal.show(server, "/completions", body, arguments, lambda choice: choice.get("text"))
    return 0
