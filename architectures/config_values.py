"""Values of a config.json, each of the type that its key must have. ValueError says what it is instead."""

import math
from typing import Any


def words(names: str) -> frozenset[str]:
    """A table of names."""
    return frozenset(names.split())


def integer(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """KeyError where it is missing and has no default; null is as good as missing."""
    value = config.get(key, default) if default is not None else config[key]
    value = default if value is None else value
    if type(value) is not int:
        raise ValueError(f"{key} must be an integer, got {shown(value)}")
    return value


def positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """An integer that is one or more."""
    value = integer(config, key, default)
    if value < 1:
        raise ValueError(f"{key} is {value}; it must be positive")
    return value


def refuse_quantised(config: dict[str, Any], architecture: str, what: str = "") -> None:
    """ValueError where the weights of files are codes. what: of a family is in their way."""
    for key in ("quantization_config", "compression_config", "quantization"):
        if config.get(key):
            raise ValueError(f"{key} is not supported for {architecture}{what and f', whose {what}'}")


def boolean(config: dict[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and type(value) is not bool:
        raise ValueError(f"{key} must be true or false, got {shown(value)}")
    return bool(value)


def number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number that is not negative, got {shown(value)}")
    return float(value)


def shown(value: Any) -> str:
    """A value of a file, as a message holds it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
