"""`meshlm chat`: talk to a running server from the terminal."""

import argparse
from typing import Any

from meshlm.supervisor.cli import terminal


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("chat", help="talk to a running server")
    terminal.add_flags(parser)
    parser.add_argument("--system-prompt", "--system", help="system prompt")
    parser.add_argument("-q", "--quick", "--question", metavar="MESSAGE", help="ask this once and end")


def run(arguments: argparse.Namespace) -> int:
    server = terminal.server_of(arguments)
    model = terminal.model_of(server, arguments)
    system = arguments.system_prompt
    history: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    for text in terminal.prompts(arguments.quick):
        history.append({"role": "user", "content": text})
        body = {"model": model, "messages": history}
        answer = terminal.show(server, "/chat/completions", body, arguments, _said)
        history.append({"role": "assistant", "content": answer})
    return 0


def _said(choice: dict[str, Any]) -> object:
    return (choice.get("delta") or {}).get("content")
