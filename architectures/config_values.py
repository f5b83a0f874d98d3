"""Values of a config.json and of its `quantization_config`, each of the type that its key must have. ValueError names the key."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any


def words(names: str) -> frozenset[str]:
    return frozenset(names.split())


def pairs(names: str) -> dict[str, str]:
    """A table of names, each with what it stands for: name=other."""
    return dict(one.split("=") for one in names.split())


def integer(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """KeyError where it is missing and has no default; null is as good as missing."""
    value = config.get(key, default) if default is not None else config[key]
    value = default if value is None else value
    if type(value) is not int:
        raise ValueError(f"{key} must be an integer, got {shown(value)}")
    return value


def positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = integer(config, key, default)
    if value < 1:
        raise ValueError(f"{key} is {value}; it must be positive")
    return value


def same_in_all(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """An integer that a file says once, or again for each layer. KeyError, ValueError."""
    given = config.get(key)
    if isinstance(given, list) and given and all(one == given[0] for one in given):
        config = {key: given[0]}
    return integer(config, key, default)


def layer_kinds(given: Any, layers: int, known: Iterable[str]) -> list[str]:
    """The kind of each layer, as layer_types names them. ValueError."""
    if not isinstance(given, list) or len(given) != layers:
        raise ValueError(f"layer_types must name the kind of each of {layers} layers, got {shown(given)}")
    for layer, kind in enumerate(given):
        if kind not in known:
            raise ValueError(f"layer_types holds {shown(kind)} for layer {layer}; supported: {', '.join(known)}")
    return given


def only_these(config: dict[str, Any], wanted: Mapping[str, Any], architecture: str) -> None:
    """ValueError where a key has another value than this one."""
    for key, value in wanted.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} {shown(config[key])} is not supported for {architecture}; supported: {value}")


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
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def only(config: dict[str, Any], known: str) -> None:
    """A key that is null, false, 0 or empty asks for nothing."""
    foreign = next((key for key, value in config.items() if value and key not in known.split()), None)
    if foreign is not None:
        raise ValueError(f"{foreign} {shown(config[foreign])} is not supported")


def one_of(config: dict[str, Any], key: str, choices: tuple[Any, ...]) -> Any:
    value = config.get(key)
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        supported = ", ".join(str(choice) for choice in choices if choice is not None)
        raise ValueError(f"{key} {shown(value)} is not supported; supported: {supported}")
    return value


def same(config: dict[str, Any], key: str, other: str) -> None:
    one, two = config.get(key), config.get(other)
    if one is not None and two is not None and one != two:
        raise ValueError(f"{key} {shown(one)} and {other} {shown(two)} contradict each other")


def names(config: dict[str, Any], key: str) -> tuple[str, ...]:
    """Names of layers, and regular expressions that can be compiled."""
    found = config.get(key) or []
    if not isinstance(found, list) or not all(isinstance(name, str) and name for name in found):
        raise ValueError(f"{key} must be a list of names, got {shown(found)}")
    for name in found:
        try:
            re.compile(name[3:] if name.startswith("re:") else "")
        except re.error as error:
            raise ValueError(f"{key}: {shown(name)} is no regular expression ({error})") from None
    return tuple(found)


def block_sizes(config: dict[str, Any], key: str) -> tuple[int, int]:
    sizes = config.get(key)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"{key} must be two positive integers, got {shown(sizes)}")
    return sizes[0], sizes[1]
