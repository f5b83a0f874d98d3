"""Fill-in-the-middle: the tokens with which models were trained to write what stands between two texts. Pure; used by encode.py."""

from array import array
from collections.abc import Callable
from typing import NamedTuple

from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import RequestError


class Infill(NamedTuple):
    """One format: its three tokens by their names, and whether the text behind the gap stands first."""

    prefix: str
    suffix: str
    middle: str  # empty: the model goes on behind the prefix
    suffix_first: bool = False


# StarCoder, StableCode and Granite Code; Qwen Coder and CodeGemma; DeepSeek Coder; Codestral.
FORMATS = (
    Infill("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    Infill("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    Infill("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    Infill("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    Infill("[PREFIX]", "[SUFFIX]", "", suffix_first=True),
)


def format_of(token_to_id: Callable[[str], int | None]) -> Infill | None:
    for found in FORMATS:
        if all(token_to_id(name) is not None for name in found[:3] if name):
            return found
    return None


def infilled(
    prefix: "array[int]", suffix: "array[int]", begin: "array[int]", token_to_id: Callable[[str], int | None]
) -> "array[int]":
    """The prompt for what stands between the two. begin: tokens that every prompt begins with. RequestError where the model cannot."""
    wanted = format_of(token_to_id)
    if wanted is None:
        known = ", ".join(one.prefix for one in FORMATS)
        text = f"suffix: this model's tokenizer has no tokens for filling in the middle ({known} and the like)"
        raise RequestError(ErrorKind.INVALID, text, "suffix")
    ids = [token_to_id(name) for name in wanted[:3] if name]
    of_prefix, of_suffix, *middle = (token for token in ids if token is not None)
    parts = [(of_prefix, prefix), (of_suffix, suffix)]
    found = array("i", begin)
    for token, text_ids in reversed(parts) if wanted.suffix_first else parts:
        found.append(token)
        found += text_ids
    return found + array("i", middle)
