"""The command line: finds the subcommand, turns errors into one line and an exit code.

Subcommands live in their own modules and are imported when they are asked for.
"""

import argparse
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from meshlm import __version__
from meshlm.runtime.process.entry import import_structlog
from meshlm.runtime.process.streams import complain, flush, json_from_here, open_closed
from meshlm.supervisor.cli import habits
from meshlm.supervisor.errors import StartError, UsageError
from meshlm.supervisor.settings.config_file import expand
from meshlm.supervisor.settings.flags import Setting, settings
from meshlm.supervisor.settings.vllm_flags import did_you_mean, say_repeated, with_dashes, with_json

COMMANDS = {  # the module of each; those of bench have a room of their own
    "serve": "cli.serve",
    "run_batch": "cli.run_batch",
    "launch": "cli.launch",
    "status": "cli.status",
    "top": "cli.top",
    "logs": "cli.status",
    **dict.fromkeys(("scale", "set", "restart", "drain"), "cli.operate"),
    "trace": "cli.trace",
    "replay": "cli.replay",
    "bench": "bench",
    **dict.fromkeys(("chat", "complete"), "cli.terminal"),
    "doctor": "cli.doctor",
    **dict.fromkeys(("tune", "save_sharded_state"), "cli.offline"),
    **dict.fromkeys(("keys", "completion", "collect_env"), "cli.machine"),
}


class _OneLineParser(argparse.ArgumentParser):
    """An argparse whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        complain(f"{self.prog}: error: {message} (see {self.prog} --help)")
        sys.exit(2)


def main(argv: list[str] | None = None) -> NoReturn:
    """Exit codes: 0 done, 1 the mesh failed, 2 wrong usage, 130 interrupted."""
    open_closed()
    code = run(sys.argv[1:] if argv is None else argv)
    flush()
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        if not argv:
            print(habits.FIRST_STEPS)
            return 0
        typed = with_dashes(habits.translated(argv))
        argv = with_json(expand(typed))
        if argv[:1] == ["serve"] and (word := asked_help(argv)) is not None:
            print("\n".join(flag_help_lines(word)))
            return 0
        argv = _with_form(plain_help(argv))
        if argv[:1] == ["serve"] and _wants_json(argv):
            json_from_here()
        if argv[:1] == ["serve"]:
            say_repeated(typed, [setting.flag for setting in settings() if not setting.repeats])
        parser = parser_of(argv)
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:
            command = _command(parser, argv)
            command.error(_unknown(unknown, command))
        return int(arguments.run(arguments))
    except UsageError as error:
        complain(f"meshlm: error: {error}")
        return 2
    except StartError as error:
        complain(f"meshlm: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _with_form(argv: list[str]) -> list[str]:
    """`serve --dry-run MODEL`: the word behind it is not its form, unless it is one."""
    if argv[:1] != ["serve"]:
        return argv
    following = [*argv[1:], ""]
    bare = ("--dry-run" if after in ("text", "json") else "--dry-run=text" for after in following)
    return [form if word == "--dry-run" else word for word, form in zip(argv, bare, strict=True)]


def _command(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.ArgumentParser:
    """The parser of the command that the words name."""
    for word in argv:
        below = next((each for each in parser._actions if isinstance(each, argparse._SubParsersAction)), None)
        if below is None:
            break
        parser = below.choices.get(word, parser)
    return parser


def _unknown(words: list[str], command: argparse.ArgumentParser) -> str:
    """One line about words that no flag of this command is. Those of another command are no misspellings."""
    of_serve = {setting.flag for setting in settings()}
    if command.prog == "meshlm serve":
        return did_you_mean(words, of_serve)
    taken = [flag for each in command._actions if each.help != argparse.SUPPRESS for flag in each.option_strings[-1:]]
    flag = next((word.partition("=")[0] for word in words if word.startswith("-")), "")
    if flag in of_serve:
        return f"{flag} is of `meshlm serve`; {command.prog} takes {', '.join(taken)}"
    return did_you_mean(words, taken)


def _wants_json(argv: list[str]) -> bool:
    """Whether errors of the command line are to be JSON too."""
    return "--log-format=json" in argv or ("--log-format", "json") in itertools.pairwise(argv)


def parser_of(argv: list[str]) -> argparse.ArgumentParser:
    """The parser of the command that these words name; of all commands where they name none."""
    parser = _OneLineParser(prog="meshlm", description="Serve large language models from a mesh of processes.")
    parser.add_argument("-v", "--version", action="version", version=f"meshlm {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_OneLineParser)
    wanted = next((word.replace("-", "_") for word in argv if not word.startswith("-")), None)
    for name in dict.fromkeys(COMMANDS.values()) if wanted not in COMMANDS else (COMMANDS[wanted],):
        if name in ("cli.serve", "cli.run_batch", "cli.replay", "cli.launch", "cli.doctor"):  # which log
            import_structlog()
        module = importlib.import_module(f"meshlm.supervisor.{name}")
        module.add_parser(commands)
        if hasattr(module, "run"):  # else each of its commands has its own
            commands.choices[name.rpartition(".")[2].replace("_", "-")].set_defaults(run=module.run)
    return parser


EVERYTHING = ("", "all", "page")
GROUPS = "listgroup"
OF_VLLM = {"frontend": "server", "loadconfig": "model", "compilationconfig": "worker", "deviceconfig": "worker"}
"""Groups of vLLM's help that have another name here."""


def asked_help(words: Sequence[str]) -> str | None:
    """The WORD of --help=WORD, lower case; None without one, and where all help is wanted."""
    found = next((word.partition("=")[2].lower() for word in words if word.startswith("--help=")), None)
    return None if found in EVERYTHING else found


def plain_help(words: Sequence[str]) -> list[str]:
    return ["--help" if word.startswith("--help=") else word for word in words]


def flag_help_lines(word: str) -> list[str]:
    every = settings()
    groups = list(dict.fromkeys(setting.section for setting in every))
    if word == GROUPS:
        return [f"groups for --help=GROUP: {', '.join(groups)}"]
    group = OF_VLLM.get(word, word.removesuffix("config"))  # vLLM's groups are called ModelConfig and so on
    if group in groups:
        return [line for setting in every if setting.section == group for line in _help_lines(setting)]
    plain_word = word.strip("-").replace("_", "-")
    found = [line for setting in every if plain_word in _searched(setting) for line in _help_lines(setting)]
    return found or [f"no flag speaks of {word!r}; --help shows all, --help={GROUPS} the groups"]


def _searched(setting: Setting) -> str:
    return f"{setting.flag} {_description(setting)}".lower()


def _description(setting: Setting) -> str:
    return (setting.meta.description if setting.meta else "") or ""


def _help_lines(setting: Setting) -> list[str]:
    default = "" if setting.default in (None, "", (), True, False) else f" (default {setting.default})"
    return [f"  {setting.flag}", f"      {_description(setting)}{default}"]
