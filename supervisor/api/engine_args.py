"""`EngineArgs`: the settings of an `LLM` or `AsyncLLM` as an object, by vLLM's name.

It has a field for each flag of `meshlm serve`, and for each of vLLM's that `LLM` takes; None stands for the default.

    args = EngineArgs("Qwen/Qwen3-0.6B", max_model_len=4096)
    LLM.from_engine_args(args), LLM(**dataclasses.asdict(args))
"""

import argparse
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

from meshlm.supervisor.api.arguments import names, settings_of
from meshlm.supervisor.settings import flags

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
