"""The settings that may change while a mesh runs (`meshlm set`, POST /settings), and how."""

from collections.abc import Mapping
from typing import Any

import msgspec

from meshlm.protocol.config import MeshConfig, log_levels

CHANGING = {
    "log_level": "run",
    "log_requests_per_s": "run",
    "max_concurrent_requests": "server",
    "max_concurrent_bytes": "server",
    "max_waiting": "scheduler",
}
"""Name of a setting -> its section. Who uses one reads it from the configuration each time, or hears ChangeSettings."""


def changed(config: MeshConfig, values: Mapping[str, Any]) -> MeshConfig:
    """The configuration with these values. ValueError, in one line, for one that is not there or not right."""
    for name, value in values.items():
        if name not in CHANGING:
            raise ValueError(f"{name.replace('_', '-')}: it cannot change while the mesh runs; these can: {known()}")
        if name == "log_level":
            try:
                log_levels.parse(str(value))
            except ValueError as error:
                raise ValueError(f"log-level: {error}") from None
        section = getattr(config, CHANGING[name])
        try:
            after = msgspec.convert({**msgspec.to_builtins(section), name: value}, type(section), strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name.replace('_', '-')}: {str(error).partition(' - at ')[0]}") from None
        config = msgspec.structs.replace(config, **{CHANGING[name]: after})
    return config


def known() -> str:
    return ", ".join(name.replace("_", "-") for name in CHANGING)
