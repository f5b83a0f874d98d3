"""The digest that two processes compare: what it knows of a message."""

from enum import Enum

import msgspec
from msgspec import Struct

from meshlm.protocol.wire import digest


def described(kind: type[Struct]) -> str:
    seen: dict[str, str] = {}
    digest._describe(kind, seen)
    return seen[kind.__name__]


def test_digest_knows_names_types_and_tags() -> None:
    base = msgspec.defstruct("M", [("a", int, 0)], tag="m")
    others = [
        msgspec.defstruct("M", [("b", int, 0)], tag="m"),
        msgspec.defstruct("M", [("a", float, 0)], tag="m"),
        msgspec.defstruct("M", [("a", int, 0)], tag="n"),
        msgspec.defstruct("M", [("a", int, 0)], tag="m", array_like=True),
    ]
    assert described(base) == described(msgspec.defstruct("M", [("a", int, 0)], tag="m"))
    assert described(base) not in [described(other) for other in others]


def test_digest_knows_defaults() -> None:
    """With omit_defaults a default is part of the wire: it is what an absent field means."""
    one = msgspec.defstruct("M", [("max_tokens", int, 16)], omit_defaults=True)
    other = msgspec.defstruct("M", [("max_tokens", int, 32)], omit_defaults=True)
    assert described(one) != described(other)
    lists = [
        msgspec.defstruct("M", [("ids", list[int], default)])
        for default in ([], msgspec.field(default_factory=lambda: [1]))
    ]
    assert described(lists[0]) != described(lists[1])


def test_digest_knows_the_values_of_enums() -> None:
    one, other = (
        msgspec.defstruct("M", [("kinds", list[Enum("Kind", {"LATE": value})], [])])  # type: ignore[misc]
        for value in ("late", "timeout")
    )
    seen: list[dict[str, str]] = [{}, {}]
    digest._describe(one, seen[0])
    digest._describe(other, seen[1])
    assert seen[0]["Kind"] != seen[1]["Kind"]
    assert seen[0]["M"] == seen[1]["M"]
