"""The keyword arguments of `LLM` as settings: the flags with underscores, vLLM's other ones included. Used by llm.py."""

import argparse
import json
from collections.abc import Mapping
from typing import Any, get_origin

from meshlm.supervisor import flags
from meshlm.supervisor.sizes import size_parser
from meshlm.supervisor.vllm_table import ABSENT, NEEDLESS, ONLY, RENAMED, VALUES


def settings_of(arguments: Mapping[str, Any]) -> dict[str, object]:
    """By name, as flags.build takes them. None is the default, as in vLLM. TypeError for a name that nobody knows, ValueError for
    what is not there."""
    known = {setting.name: setting for setting in flags.settings()}
    renamed = {flag: ours for names, ours in RENAMED.items() for flag in names}
    found: dict[str, object] = {}
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        ours = renamed.get(flag, name)
        if value is None and (ours in known or flag in ABSENT or flag in ONLY or flag in NEEDLESS):
            continue
        if ours in known:
            found[ours] = _value(known[ours], value)
        elif flag in ABSENT or flag in ONLY:
            _check(name, flag, value)
        elif flag not in NEEDLESS:
            raise TypeError(f"LLM: unknown argument {name!r}")
    return found


def _check(name: str, flag: str, value: Any) -> None:
    """What is not there may be asked not to be."""
    if flag in ABSENT and value not in (False, 0, "", [], {}):
        raise ValueError(f"LLM: {name}: {ABSENT[flag]}")
    if flag in ONLY and value not in ONLY[flag][0]:
        raise ValueError(f"LLM: {name}={value!r}: {ONLY[flag][1]}")


def _value(setting: flags.Setting, value: Any) -> object:
    extra = (setting.meta.extra or {}) if setting.meta else {}
    if isinstance(value, dict):
        return json.dumps(value)
    if not isinstance(value, str):
        return list(value) if isinstance(value, tuple) else value
    if get_origin(setting.kind) is tuple:
        return [value]
    try:
        if parse := size_parser(extra):
            return parse(value)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"LLM: {setting.name}: {error}") from None
    return VALUES.get(setting.name, {}).get(value, value)
