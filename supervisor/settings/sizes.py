"""Sizes and counts as people write them: 4G, 32k. Used by flags.py, config_file.py and arguments.py."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

# As in vLLM: k, m, g and t are decimal, K, M, G and T binary.
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_UNITS |= {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_bytes(text: str) -> int:
    """'4G' and '4GiB' -> 4294967296, '4g' -> 4000000000. ArgumentTypeError otherwise."""
    number = text.strip()
    for ending in ("iB", "B"):
        number = number.removesuffix(ending)
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        value = int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: a number with K, M, G or T, like 4G") from None
    return value


def parse_count(text: str) -> int:
    """'32k' -> 32000, '32K' -> 32768. ArgumentTypeError otherwise."""
    number, unit = (text[:-1], text[-1]) if text[-1:].isalpha() else (text, "")
    try:
        return int(float(number) * _UNITS[unit]) if unit else int(number)
    except (ValueError, KeyError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, like 4096 or 32k") from None


def parse_count_or_auto(text: str) -> int:
    """The same, and 'auto' -> -1."""
    return -1 if text == "auto" else parse_count(text)


def size_parser(extra: Mapping[str, Any]) -> Callable[[str], int] | None:
    """The parser of the words of a setting with this `extra` (protocol/config/); None when it is neither a size nor a count."""
    if extra.get("bytes"):
        return parse_bytes
    if extra.get("count"):
        return parse_count_or_auto if extra.get("auto") else parse_count
    return None
