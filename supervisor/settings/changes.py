"""What the supervisor answers to `meshlm set`: the settings that may change while the mesh runs, or their change."""

from collections.abc import Callable
from typing import Any

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.changing import CHANGING, checked
from meshlm.protocol.config.log_levels import level_of
from meshlm.protocol.edges.control import ChangeSettings
from meshlm.protocol.wire.ids import Identity
from meshlm.runtime.process import logs

Values = dict[str, str | int | float]


def answer(request: dict[str, object], config: MeshConfig, change: Callable[[Values], str]) -> dict[str, Any]:
    """`values` is missing where they are only asked for; they come as text."""
    values = request.get("values", {})
    if not isinstance(values, dict):
        return {"error": "values: names and values are expected"}
    try:
        after = checked(config, values)
    except ValueError as error:
        return {"error": str(error)}
    now = {name: getattr(getattr(after, section), name) for name, section in CHANGING.items()}
    if values and (why := change({name: now[name] for name in values})):
        return {"error": why}
    return {"settings": now}


def applied(message: ChangeSettings, config: MeshConfig, identity: Identity | None) -> MeshConfig:
    """The configuration with these settings; a log level counts at once in this process, which is `identity`. ValueError."""
    config = checked(config, message.values)
    if "log_level" in message.values:
        logs.set_level(level_of(config.run.log_level, identity))
    return config


def said(values: Values) -> str:
    """The line for the user."""
    return "settings: " + ", ".join(f"{name.replace('_', '-')} {value}" for name, value in values.items())
