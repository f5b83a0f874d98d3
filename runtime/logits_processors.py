"""Which logits processors a mesh has, and what they say of a request's parameters. workers/output/processors.py applies them.

The supervisor finds them once: --logits-processors, and entry points of the group `meshlm.logits_processors`. Workers make them;
frontends and `LLM` ask their classes whether they take a request's `extra_args`, so a class should import torch where it computes.
"""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime import plugins
from meshlm.runtime.errors import RequestError


class ProcessorError(Exception):
    """A logits processor cannot be used; one line that names it."""


def loaded(names: Iterable[str]) -> list[type[Any]]:
    """The classes of these names, `module:Class` or `module.Class`. ProcessorError."""
    found = []
    for name in names:
        module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
        try:
            kind: Any = importlib.import_module(module) if module else None
            for part in attribute.split("."):
                kind = getattr(kind, part)
        except Exception as error:  # its module may raise anything, and the user must read whose it is
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ProcessorError(f"logits processor {name}: {what}") from None
        if not isinstance(kind, type) or not all(hasattr(kind, method) for method in ("apply", "update_state")):
            raise ProcessorError(f"logits processor {name}: must be a class with apply and update_state")
        found.append(kind)
    return found


def names(given: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """The names that the flag gives and those of installed packages, each once. PluginError."""
    return tuple(dict.fromkeys([*given, *plugins.values(plugins.LOGITS_PROCESSORS, environment)]))


def check(kinds: Iterable[type[Any]], params: SamplingParams) -> None:
    """RequestError for parameters that one of the classes refuses."""
    for kind in kinds:
        validate = getattr(kind, "validate_params", None)
        try:
            if validate is not None:
                validate(params)
        except ValueError as error:
            raise RequestError(ErrorKind.INVALID, f"vllm_xargs: {error}", "vllm_xargs") from None
