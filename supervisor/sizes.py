"""Sizes and counts as people write them: 4G, 32k. Used by flags.py, config_file.py and arguments.py."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


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


def size_parser(extra: Mapping[str, Any]) -> Callable[[str], int] | None:
    """What reads the words of a setting with this `extra` (protocol/config.py); None when it is neither a size nor a count."""
    return parse_bytes if extra.get("bytes") else parse_count if extra.get("count") else None
