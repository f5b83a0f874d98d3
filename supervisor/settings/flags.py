"""The command line and the TOML file, generated from the configuration tree.

Each field of each section of `MeshConfig` is one flag and one TOML key, so a setting exists once; a field without a
description is what flags come to, and none itself. Nothing here knows what a setting means.
"""

import argparse
import math
from collections.abc import Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from meshlm.protocol.config import MeshConfig
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import config_file, vllm_flags
from meshlm.supervisor.settings.sizes import size_parser
from meshlm.supervisor.settings.vllm_table import VALUES


class Setting(NamedTuple):
    """One field of the tree as a flag."""

    section: str
    name: str
    kind: Any  # the type without Annotated and None
    meta: Meta | None
    default: object

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def repeats(self) -> bool:
        """Whether the flag may be given again, for more values."""
        return bool(self.meta and (self.meta.extra or {}).get("repeat"))


@cache
def settings() -> tuple[Setting, ...]:
    """All settings of the tree, section by section."""
    return tuple(_read_settings())


def _read_settings() -> Iterator[Setting]:
    sections = get_type_hints(MeshConfig)
    for section, struct in sections.items():
        if not (isinstance(struct, type) and issubclass(struct, Struct)):
            continue
        hints = get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            kind, meta = hints[field.name], None
            if NoneType in get_args(kind):
                (kind,) = (inner for inner in get_args(kind) if inner is not NoneType)
            if get_origin(kind) is Annotated:
                kind, meta = get_args(kind)[:2]
            if meta is None:  # what flags come to (SpeculativeConfig)
                continue
            yield Setting(section, field.name, kind, meta, field.default)


def given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings among the arguments of a command."""
    names = {setting.name for setting in settings()}
    return {name: value for name, value in vars(arguments).items() if name in names}


def add_flags(parser: argparse.ArgumentParser, *, from_file: bool = False) -> None:
    """Add every setting to `parser`; unset flags stay out of the namespace, so that TOML can fill them. from_file: and --config."""
    if from_file:
        parser.add_argument("--config", help="TOML or YAML file with any of these settings; flags win")
    vllm_flags.add(parser)
    groups: dict[str, Any] = {}
    for setting in settings():
        if setting.section not in groups:
            groups[setting.section] = parser.add_argument_group(setting.section)
        group, names = groups[setting.section], [setting.flag]
        extra = (setting.meta.extra or {}) if setting.meta else {}
        if "short" in extra:
            names.insert(0, extra["short"])
        hidden = {"dest": setting.name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if setting.name == "model":
            group.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=_help(setting))
            group.add_argument("--model", **hidden)
            continue
        keywords = _argument(setting, extra)
        group.add_argument(*names, **{**hidden, "help": _help(setting)}, **keywords)
        if others := list(vllm_flags.names(setting.name)):
            group.add_argument(*others, **hidden, **keywords)


def _help(setting: Setting) -> str:
    text = (setting.meta.description if setting.meta else "") or ""
    shown = setting.default not in (None, "", (), True, False)
    text = f"{text} (default {setting.default})" if shown else text
    return text.replace("%", "%%")


def _argument(setting: Setting, extra: dict[str, Any]) -> dict[str, Any]:
    kind = setting.kind
    metavar = setting.name.upper()
    if parse := size_parser(extra):
        return {"type": parse, "metavar": "BYTES" if extra.get("bytes") else metavar}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if setting.name in VALUES:
            return {"choices": choices, "type": lambda text: vllm_flags.meant(setting.name, text)}
        return {"choices": choices, "type": type(choices[0])}
    if get_origin(kind) is tuple:
        (each, _) = get_args(kind)
        if get_origin(each) is Literal:
            return {"nargs": "+", "choices": get_args(each)}
        return {"nargs": "+", "type": each, "metavar": metavar, "action": "extend" if "repeat" in extra else "store"}
    if setting.name in VALUES:
        return {"type": lambda text: vllm_flags.meant(setting.name, text), "metavar": metavar}
    return {"type": kind, "metavar": metavar}


def build(values: dict[str, object], file: str | None, environment: Mapping[str, object] | None = None) -> MeshConfig:
    """The tree from flags (they win) over the TOML file over the environment over the defaults. UsageError names the flag or key."""
    sections: dict[str, dict[str, object]] = {}
    known = {setting.name: setting for setting in settings()}
    for name, value in {**(environment or {}), **config_file.read_toml(file, known), **values}.items():
        if name in known:
            value = tuple(_listed(known[name], value)) if isinstance(value, list) else value
            if not _is_text(value):
                raise UsageError(f"{known[name].flag} {value!a}: must be UTF-8")
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{known[name].flag} {value}: must be a finite number")
            sections.setdefault(known[name].section, {})[name] = value
    try:
        return msgspec.convert(sections, MeshConfig)
    except msgspec.ValidationError as error:
        raise UsageError(_name_flag(str(error))) from None


def _is_text(value: object) -> bool:
    """Whether the processes can be told of it: a word of bytes that are no UTF-8 has halves of characters in Python."""
    try:
        for word in value if isinstance(value, tuple) else (value,):
            str(word).encode()
    except UnicodeEncodeError:
        return False
    return True


def _listed(setting: Setting, values: list[Any]) -> list[Any]:
    """vLLM takes some lists as one word of JSON: '["a", "b"]'."""
    if not ((setting.meta and setting.meta.extra) or {}).get("json") or len(values) != 1:
        return values
    word = values[0]
    if not (isinstance(word, str) and word.startswith("[")):
        return values
    try:
        return msgspec.json.decode(word, type=list[str])
    except msgspec.DecodeError as error:
        raise UsageError(f"{setting.flag} {word}: {error}; give the words, or a JSON list of them") from None


def _name_flag(message: str) -> str:
    """msgspec's 'Expected ... - at `$.server.port`' with the flag instead of the path."""
    what, _, path = message.partition(" - at `$.")
    if not path:
        return message
    name = path.rstrip("`").split("[")[0].split(".")[-1]
    return f"--{name.replace('_', '-')}: {what[:1].lower()}{what[1:]}"
