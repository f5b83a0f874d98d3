"""The command line and the TOML file, generated from the configuration tree.

Each field of each section of `MeshConfig` is one flag and one TOML key, so a setting exists once. Nothing here knows
what a setting means.
"""

import argparse
import difflib
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from meshlm.protocol.config import MeshConfig
from meshlm.supervisor import vllm_flags
from meshlm.supervisor.errors import UsageError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


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


def settings() -> Iterator[Setting]:
    """All settings of the tree, section by section."""
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
            yield Setting(section, field.name, kind, meta, field.default)


def parse_bytes(text: str) -> int:
    """'4G' -> 4294967296; 1024-based, optional B or iB. ArgumentTypeError otherwise."""
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        value = int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: a number with K, M, G or T, like 4G") from None
    return value


def parse_count(text: str) -> int:
    """'32k' -> 32000, '32K' -> 32768, as in vLLM; k, m and g are decimal, K, M and G binary. ArgumentTypeError otherwise."""
    number, unit = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "")
    factor = _UNITS.get(unit) if unit == unit.upper() else {"k": 10**3, "m": 10**6, "g": 10**9}.get(unit)
    try:
        return int(number) if factor == 1 else int(float(number) * factor)  # type: ignore[operator]
    except (ValueError, TypeError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, like 4096 or 32k") from None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every setting to `parser`; unset flags stay out of the namespace, so that TOML can fill them."""
    vllm_flags.add(parser)
    groups: dict[str, Any] = {}
    for setting in settings():
        group = groups.get(setting.section) or groups.setdefault(
            setting.section, parser.add_argument_group(setting.section)
        )
        names = [setting.flag]
        extra = (setting.meta.extra or {}) if setting.meta else {}
        if "short" in extra:
            names.insert(0, extra["short"])
        if setting.name == "model":
            group.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=_help(setting))
            group.add_argument("--model", dest="model", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
            continue
        keywords = _argument(setting, extra)
        group.add_argument(*names, dest=setting.name, default=argparse.SUPPRESS, help=_help(setting), **keywords)
        if others := list(vllm_flags.names(setting.name)):
            group.add_argument(
                *others, dest=setting.name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **keywords
            )


def _help(setting: Setting) -> str:
    text = (setting.meta.description if setting.meta else "") or ""
    shown = setting.default not in (None, "", (), True, False)
    text = f"{text} (default {setting.default})" if shown else text
    return text.replace("%", "%%")


def _argument(setting: Setting, extra: dict[str, Any]) -> dict[str, Any]:
    """The argparse keywords for this setting's type."""
    kind = setting.kind
    metavar = setting.name.upper()
    if extra.get("bytes"):
        return {"type": parse_bytes, "metavar": "BYTES"}
    if extra.get("count"):
        return {"type": parse_count, "metavar": metavar}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        choices, synonyms = get_args(kind), vllm_flags.VALUES.get(setting.name)
        if synonyms:
            return {"choices": choices, "type": lambda text: synonyms.get(text, text)}
        return {"choices": choices, "type": type(choices[0])}
    if get_origin(kind) is tuple:
        (each, _) = get_args(kind)
        if get_origin(each) is Literal:
            return {"nargs": "+", "choices": get_args(each)}
        return {"nargs": "+", "type": each, "metavar": metavar}
    return {"type": kind, "metavar": metavar}


def build(values: dict[str, object], toml_file: str | None) -> MeshConfig:
    """The tree from flags (they win) over the TOML file over the defaults. UsageError names the flag or key."""
    sections: dict[str, dict[str, object]] = {}
    known = {setting.name: setting for setting in settings()}
    for name, value in {**_read_toml(toml_file, known), **values}.items():
        if name in known:
            value = tuple(value) if isinstance(value, list) else value
            sections.setdefault(known[name].section, {})[name] = value
    try:
        return msgspec.convert(sections, MeshConfig)
    except msgspec.ValidationError as error:
        raise UsageError(_name_flag(str(error))) from None


def _name_flag(message: str) -> str:
    """msgspec's 'Expected ... - at `$.server.port`' with the flag instead of the path."""
    what, _, path = message.partition(" - at `$.")
    if not path:
        return message
    name = path.rstrip("`").split("[")[0].split(".")[-1]
    return f"--{name.replace('_', '-')}: {what[:1].lower()}{what[1:]}"


def _read_toml(file: str | None, known: dict[str, Setting]) -> dict[str, object]:
    """Settings of a TOML file, given flat or under their section, dashes or underscores."""
    if file is None:
        return {}
    try:
        tree = tomllib.loads(Path(file).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--config {file}: {error}") from None
    sections = {setting.section for setting in known.values()}
    found: dict[str, object] = {}
    for key, value in tree.items():
        inner = value.items() if key in sections and isinstance(value, dict) else [(key, value)]
        for name, setting_value in inner:
            found[_known(name, known, file)] = setting_value
    for name, value in found.items():
        extra = known[name].meta
        if isinstance(value, str) and extra is not None and (extra.extra or {}).get("bytes"):
            try:
                found[name] = parse_bytes(value)
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"--config {file}: {name}: {error}") from None
    return found


def _known(name: str, known: dict[str, Setting], file: str) -> str:
    plain = name.replace("-", "_")
    if plain in known:
        return plain
    close = difflib.get_close_matches(plain, known, n=1)
    hint = f"; did you mean {close[0].replace('_', '-')}?" if close else ""
    raise UsageError(f"--config {file}: unknown key {name!r}{hint}")
