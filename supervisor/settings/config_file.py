"""--config FILE: settings in TOML, by their names, or in YAML as `vllm serve` takes them.

A YAML file becomes words of the command line, before those that were typed, so that vLLM's other names and its flags that are not
needed or not there mean the same in both places. Called by cli/main.py (YAML) and flags.py (TOML).
"""

import argparse
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshlm.supervisor.errors import UsageError, raised_as
from meshlm.supervisor.settings.sizes import size_parser

if TYPE_CHECKING:
    from meshlm.supervisor.settings.flags import Setting

YAML = (".yaml", ".yml")


def expand(words: Sequence[str]) -> list[str]:
    """The words with those of a YAML file in place of `--config FILE`. UsageError when it cannot be read."""
    found = list(words)
    for at, word in enumerate(found):
        if word == "--config" and found[at + 1 : at + 2]:
            file, count = found[at + 1], 2
        elif word.startswith("--config="):
            file, count = word.partition("=")[2], 1
        else:
            continue
        if file.endswith(YAML):
            del found[at : at + count]
            return [*found[:1], *_yaml_words(file, typed=found), *found[1:]]
    return found


def _yaml_words(file: str, typed: Sequence[str]) -> list[str]:
    """A flag that was typed too is left out: those that may be repeated would add up."""
    import yaml  # of those that ask for it alone

    try:
        tree = yaml.safe_load(Path(file).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config {file}: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UsageError(f"--config {file}: must be settings, one `name: value` a line")
    words: list[str] = []
    for name, value in tree.items():
        plain = str(name).replace("_", "-")
        if any(word.partition("=")[0] == f"--{plain}" for word in typed):
            continue
        words += _words_of("--model" if plain == "model-tag" else f"--{plain}", value)
    return words


def _words_of(flag: str, value: Any) -> list[str]:
    match value:
        case None:
            return []
        case bool():
            return [flag if value else f"--no-{flag.removeprefix('--')}"]
        case list():
            return [flag, *map(str, value)]
        case dict():
            return [flag, json.dumps(value)]
    return [flag, str(value)]


def read_toml(file: str | None, known: Mapping[str, "Setting"]) -> dict[str, object]:
    """Settings of a TOML file, given flat or under their section, dashes or underscores."""
    if file is None:
        return {}
    with raised_as(UsageError, OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, of=f"--config {file}"):
        tree = tomllib.loads(Path(file).read_text("utf-8"))
    sections = {setting.section for setting in known.values()}
    found: dict[str, object] = {}
    for key, value in tree.items():
        inner = value.items() if key in sections and isinstance(value, dict) else [(key, value)]
        for name, setting_value in inner:
            found[_known(name, known, file)] = setting_value
    for name, value in found.items():
        meta = known[name].meta
        parse = size_parser((meta.extra or {}) if meta else {})
        if isinstance(value, str) and parse is not None:
            with raised_as(UsageError, argparse.ArgumentTypeError, of=f"--config {file}: {name}"):
                found[name] = parse(value)
    return found


def _known(name: str, known: Mapping[str, "Setting"], file: str) -> str:
    plain = name.replace("-", "_")
    if plain in known:
        return plain
    close = difflib.get_close_matches(plain, known, n=1)
    hint = f"; did you mean {close[0].replace('_', '-')}?" if close else ""
    raise UsageError(f"--config {file}: unknown key {name!r}{hint}")
