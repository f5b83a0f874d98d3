"""The keyword arguments of `LLM` as settings, the flags with underscores and vLLM's other ones, and `EngineArgs`, which holds them.

`EngineArgs` has a field for each flag of `meshlm serve`, and for each of vLLM's that `LLM` takes; None stands for the default.

    args = EngineArgs("Qwen/Qwen3-0.6B", max_model_len=4096)
    LLM.from_engine_args(args), LLM(**dataclasses.asdict(args))
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_origin

from meshlm.supervisor.errors import raised_as
from meshlm.supervisor.settings import flags, vllm_flags
from meshlm.supervisor.settings.sizes import size_parser
from meshlm.supervisor.settings.vllm_table import ABSENT, NEEDLESS, ONLY, OVERRIDES, RENAMED, SWITCHES, VARIABLES


def names() -> list[str]:
    """All that `settings_of` takes, sorted: vLLM's names too, but for those that say that something is off."""
    renamed = [flag for flags_of_one in RENAMED for flag in flags_of_one]
    others = [*renamed, *ABSENT, *ONLY, *NEEDLESS, *SWITCHES, *VARIABLES, *OVERRIDES]
    words = {flag[2:].replace("-", "_") for flag in others if flag.startswith("--") and not flag.startswith("--no-")}
    return sorted(words | {setting.name for setting in flags.settings()})


def settings_of(arguments: Mapping[str, Any]) -> dict[str, object]:
    """Gives the settings by name, as flags.build takes them. None is the default, as in vLLM. TypeError for a name that nobody knows,
    ValueError for what is not there."""
    known = {setting.name: setting for setting in flags.settings()}
    renamed = {flag: ours for names, ours in RENAMED.items() for flag in names}
    found: dict[str, object] = {}
    overrides: dict[str, Any] = {}
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        ours = renamed.get(flag, name)
        opposite = f"--no-{flag[2:]}"
        tables = (ABSENT, ONLY, NEEDLESS, SWITCHES, VARIABLES, OVERRIDES)
        if ours not in known and not any(flag in table or opposite in table for table in tables):
            raise TypeError(f"LLM: unknown argument {name!r}")
        asked = opposite if value is False and opposite in (*SWITCHES, *ABSENT, *NEEDLESS) else flag
        if value is None:
            continue
        if ours == "logits_processors":
            if not isinstance(value, list | tuple):
                raise ValueError(f"LLM: {name}: a list of classes, or of their names, is expected")
            value = [one if isinstance(one, str) else _class_name(one) for one in value]
        if ours in known:
            found[ours] = _value(known[ours], value)
        elif asked in SWITCHES:
            setting, meaning = SWITCHES[asked]
            found[setting] = meaning
        elif flag in OVERRIDES:
            overrides[OVERRIDES[flag]] = value
        elif flag in VARIABLES:
            with raised_as(ValueError, argparse.ArgumentTypeError, of=f"LLM: {name}"):
                vllm_flags.set_variable(VARIABLES[flag], value)
        else:
            _check(name, asked, value)
    if overrides:
        given = json.loads(str(found.get("hf_overrides") or "{}"))
        found["hf_overrides"] = json.dumps({**overrides, **given})
    return found


def _check(name: str, flag: str, value: Any) -> None:
    """Refuses an argument for what MeshLM lacks, unless its value asks for nothing; warns of one that has no effect."""
    if flag in ABSENT and (flag.startswith("--no-") or value not in (False, 0, "", [], {})):
        raise ValueError(f"LLM: {name}: {ABSENT[flag]}")
    if flag in ONLY and not vllm_flags.is_only(flag, value):
        raise ValueError(f"LLM: {name}={value!r}: {ONLY[flag][1]}")
    if flag in ONLY:
        vllm_flags.say_only(flag, value)
    if flag in NEEDLESS and (value is not False or flag.startswith("--no-")):
        vllm_flags.say_needless(flag)


def _value(setting: flags.Setting, value: Any) -> object:
    extra = (setting.meta.extra or {}) if setting.meta else {}
    if isinstance(value, dict) or (setting.name == "compilation_config" and isinstance(value, int)):
        return json.dumps(value)
    if setting.name == "hf_overrides" and callable(value):
        raise ValueError("LLM: hf_overrides: a dict of keys of config.json is expected, no function")
    if setting.name == "dtype" and type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    if setting.name == "device_ids" and isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if not isinstance(value, str):
        return list(value) if isinstance(value, tuple) else value
    if get_origin(setting.kind) is tuple:
        return [value]
    with raised_as(ValueError, argparse.ArgumentTypeError, of=f"LLM: {setting.name}"):
        if parse := size_parser(extra):
            return parse(value)
        return vllm_flags.meant(setting.name, value)


def _class_name(kind: Any) -> str:
    """The name by which workers import a logits processor. ValueError for one that they cannot."""
    if not isinstance(kind, type) or kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ValueError(f"logits_processors: {kind!r} must be a class of a module that other processes can import")
    return f"{kind.__module__}:{kind.__qualname__}"


def refuse(**given: Any) -> None:
    """Refuses arguments that would change the answers and are not supported."""
    why = {"lora_request": "adapters answer with text, and this gives vectors"}
    for name, value in given.items():
        if value:
            raise ValueError(f"{name}: {why[name]}")


_Fields: Any = make_dataclass(
    "_Fields",
    [("model", str, field(default="")), *((name, Any, field(default=None)) for name in names() if name != "model")],
)


@dataclass
class EngineArgs(_Fields):  # type: ignore[misc]  # whose fields are made of the flags
    """The settings as they are given. TypeError for a name that nobody knows, ValueError for what is not there."""

    def __post_init__(self) -> None:
        settings_of({name: value for name, value in self.given().items() if name != "model"})

    def given(self) -> dict[str, Any]:
        """The settings that are not the default."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def keys(self) -> list[str]:
        """Makes `LLM(**args)` what it reads like."""
        return list(self.given())

    def __getitem__(self, name: str) -> Any:
        return self.given()[name]

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Give a program the flags of `meshlm serve`."""
        flags.add_flags(parser)
        return parser

    @classmethod
    def from_cli_args(cls, arguments: argparse.Namespace) -> "EngineArgs":
        """The settings among the arguments of such a program."""
        known = {one.name for one in fields(cls)}
        return cls(**{name: value for name, value in vars(arguments).items() if name in known})


@dataclass
class AsyncEngineArgs(EngineArgs):
    """The same, by vLLM's name for `AsyncLLM`."""
