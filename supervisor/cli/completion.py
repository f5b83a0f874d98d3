"""`meshlm completion SHELL`: the script by which a shell completes commands and flags. shtab makes it from the parser."""

import argparse
import os
import sys

from meshlm.supervisor.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
HOW = {
    "bash": "meshlm completion bash > ~/.local/share/bash-completion/completions/meshlm",
    "zsh": "meshlm completion zsh > ~/.zfunc/_meshlm, with `fpath+=~/.zfunc; autoload -Uz compinit; compinit` in ~/.zshrc",
    "fish": "meshlm completion fish > ~/.config/fish/completions/meshlm.fish",
}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script that lets a shell complete commands and flags",
        description="; ".join(f"{shell}: {how}" for shell, how in HOW.items()).replace("%", "%%"),
    )
    parser.add_argument("shell", nargs="?", help=f"{', '.join(SHELLS)}; default: the one of $SHELL")


def run(arguments: argparse.Namespace) -> int:
    shell = arguments.shell or os.path.basename(os.environ.get("SHELL", ""))
    if shell not in SHELLS:
        raise UsageError(
            f"completion: no script is there for {shell or 'a shell without a name'}; for {', '.join(SHELLS)} there is"
        )
    sys.stdout.write(script(shell))
    return 0


def script(shell: str) -> str:
    """The script for a shell."""
    import shtab  # a part of a second that no other command needs

    from meshlm.supervisor.cli.main import whole_parser

    return str(shtab.complete(whole_parser(), shell)) + "\n"
