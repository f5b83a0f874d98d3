"""A command line that worked with vLLM works, or says in one line what to write instead (vllm_table.py says which is which).

Called by flags.py, which adds vLLM's flags to its parser without showing them in the help, and by main.py for the words as they were
typed. The arguments of `LLM` are arguments.py's, by the same table.
"""

import argparse
import difflib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from meshlm.runtime.attention_packages import PACKAGES
from meshlm.runtime.process.streams import complain
from meshlm.supervisor.settings import vllm_table as table

_DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)\.([\w.-]+\+?)")  # --compilation-config.mode


class _Flag(argparse.Action):
    """One of vLLM's, by its table. const: why it is refused, and what to do instead."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, values: Any, option_string: str | None = None) -> None:
        flag = str(option_string)
        if self.const is not None:
            parser.error(f"{flag}: {self.const}")
        elif flag in table.NEEDLESS:
            say_needless(flag)
        elif flag in table.ONLY:
            if not is_only(flag, values):
                parser.error(f"{flag} {values}: {table.ONLY[flag][1]}")
            say_only(flag, values)
        elif flag in table.VARIABLES:
            try:
                set_variable(table.VARIABLES[flag], values)
            except argparse.ArgumentTypeError as error:
                parser.error(f"{flag}: {error}")
        # else `--no-` before one that is absent or needless, which asks for what is the case


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the table, but for RENAMED, whose types flags.py knows."""
    hidden: dict[str, Any] = {"dest": argparse.SUPPRESS, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    taken = parser._option_string_actions  # a command's own flags win, such as those of `vllm bench`
    for flag, (count, _) in table.NEEDLESS.items():
        if flag not in taken:
            parser.add_argument(flag, action=_Flag, nargs=count or 0, **hidden)
    refuse(parser, table.ABSENT)
    for flag in table.ONLY:
        if flag not in taken:
            parser.add_argument(flag, action=_Flag, **hidden)
    for flag in table.VARIABLES:
        parser.add_argument(flag, action=_Flag, nargs="?", **hidden)
    for flag, (setting, value) in table.SWITCHES.items():
        switch = {**hidden, "dest": setting}
        parser.add_argument(flag, action="store_const", const=value, **switch)
    for flag in (*table.ABSENT, *table.NEEDLESS):
        opposite = "--no-" + flag.removeprefix("--")
        if flag.startswith("--") and not flag.startswith("--no-") and opposite not in taken:
            parser.add_argument(opposite, action=_Flag, nargs=0, **hidden)


def refuse(parser: argparse.ArgumentParser, reasons: Mapping[str, str]) -> None:
    """Flags that end with what to do instead."""
    for flag, reason in reasons.items():
        if flag not in parser._option_string_actions:
            hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            parser.add_argument(flag, action=_Flag, nargs="*", const=reason, dest=argparse.SUPPRESS, **hidden)


def say_needless(flag: str) -> None:
    """Tells the user that a flag has no effect, and why nothing is lost."""
    complain(f"meshlm: {flag} is not needed: {table.NEEDLESS[flag][1]}", "warning")


def say_only(flag: str, value: object) -> None:
    """Tells the user what a value that is taken does not mean here, where vLLM does more by it."""
    if flag in table.SAID:
        complain(f"meshlm: {flag} {value}: {table.ONLY[flag][1]}", "warning")


def is_only(flag: str, value: object) -> bool:
    """Whether this value, or each of a list with commas, or each `key=value` of a JSON object, names what is done anyway."""
    if isinstance(value, str) and value.startswith("{"):
        value = _json_value(value)
    if isinstance(value, Mapping):
        parts = [f"{key}={one}" for key, one in value.items()]
    else:
        parts = [str(one) for one in value] if isinstance(value, list | tuple) else str(value).split(",")
    return all(part in table.ONLY[flag][0] for part in parts)


def meant(setting: str, value: str) -> str:
    """Our name for one of vLLM's values; what is different then is said. ArgumentTypeError for a value that only vLLM has."""
    if (instead := table.ABSENT_VALUES.get(setting, {}).get(value)) is not None:
        raise argparse.ArgumentTypeError(f"{value}: {instead}")
    names = table.VALUES.get(setting, {})
    ours, different = names.get(value) or names.get(value.upper()) or (value, "")  # vLLM takes backends in any case
    if setting == "attention_backend" and ours in PACKAGES and (missing := PACKAGES[ours].missing()):
        # A command of vLLM's, which brings the package, runs here too.
        ours, different = "auto", missing.removesuffix(", or use auto")
    if different:
        complain(f"meshlm: --{setting.replace('_', '-')} {value} is taken as {ours}: {different}", "warning")
    return ours


def say_repeated(words: Sequence[str], known: Collection[str]) -> None:
    """Tells the user which flags are given more than once; as in vLLM the last one counts."""
    names = [word.partition("=")[0] for word in words[: words.index("--") if "--" in words else len(words)]]
    for flag in dict.fromkeys(name for name in names if name in known and names.count(name) > 1):
        complain(f"meshlm: {flag} is given {names.count(flag)} times; the last one counts", "warning")


def with_dashes(words: Sequence[str]) -> list[str]:
    """--max_model_len as --max-model-len, which vLLM takes too; the keys of --some-config.some_key stay as they are."""

    def dashed(word: str) -> str:
        name, equals, value = word.partition("=")
        flag, dot, keys = name.partition(".")
        return flag.replace("_", "-") + dot + keys + equals + value if word.startswith("--") else word

    end = words.index("--") if "--" in words else len(words)
    return [*map(dashed, words[:end]), *words[end:]]


def with_json(words: Sequence[str]) -> list[str]:
    """--some-config.a.b 1 --some-config.c=x as --some-config '{"a": {"b": 1}, "c": "x"}', as in vLLM.

    The flags of OVERRIDES are such keys of --hf-overrides."""
    rest: list[str] = []
    trees: dict[str, dict[str, Any]] = {}
    todo = iter(words)
    for word in todo:
        name, equals, value = word.partition("=")
        found = _DOTTED.fullmatch(f"--hf-overrides.{table.OVERRIDES[name]}" if name in table.OVERRIDES else name)
        if word == "--" or found is None:
            rest += [word, *(todo if word == "--" else ())]
            continue
        value = value if equals else next(todo, "")
        *path, last = found[2].removesuffix("+").split(".")
        tree = trees.setdefault(found[1], {})
        for key in path:
            if not isinstance(tree.get(key), dict):
                tree[key] = {}
            tree = tree[key]
        tree[last] = value.split(",") if found[2].endswith("+") else _json_value(value)
    end = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:end], *(part for flag, tree in trees.items() for part in (flag, json.dumps(tree))), *rest[end:]]


def _json_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def names(setting: str) -> Iterable[str]:
    """vLLM's other names for our setting."""
    return (name for flags, ours in table.RENAMED.items() if ours == setting for name in flags)


def did_you_mean(unknown: Sequence[str], known: Iterable[str]) -> str:
    """One line about words that no flag is."""
    flag = next((word.split("=")[0] for word in unknown if word.startswith("-")), unknown[0])
    close = difflib.get_close_matches(flag, list(known), n=1)
    return f"unknown argument {flag}" + (f"; did you mean {close[0]}?" if close else "")


def set_variable(name: str, value: Any) -> None:
    """Sets it to a text. None and true ask for what is there without it (of HF_TOKEN what `hf auth login` has saved).

    ArgumentTypeError for anything else."""
    if isinstance(value, str) and value:
        os.environ[name] = value
    elif value not in (None, True, False):
        raise argparse.ArgumentTypeError(f"must be a text that is not empty, got {value!r}")
