"""A digest of everything that processes may say to each other.

Two processes whose digests differ do not understand each other; the link refuses the session with a clear text.
"""

import hashlib
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec.structs import FieldInfo

from meshlm.protocol.wire import frames
from meshlm.protocol.wire.channels import CHANNELS


def union_members(messages: Any) -> tuple[type[Struct], ...]:
    """The Struct types of a channel."""
    return get_args(messages) if isinstance(messages, UnionType) else (messages,)


@cache
def schema_digest() -> str:
    """sha256 (first 16 hex digits) over channel directions, message tags, fields' names, types and defaults, enums' values."""
    lines = [f"frame {frames.VERSION}"]
    seen: dict[str, str] = {}
    for channel in CHANNELS:
        members = union_members(channel.messages)
        for member in members:
            _describe(member, seen)
        names = sorted(member.__name__ for member in members)
        lines.append(f"{channel.sender.value}>{channel.receiver.value}: {names}")
    lines += [seen[name] for name in sorted(seen)]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def _describe(struct: type[Struct], seen: dict[str, str]) -> None:
    """Add this Struct and every Struct its fields hold to `seen`."""
    if struct.__name__ in seen:
        return
    config = struct.__struct_config__
    hints = get_type_hints(struct)
    fields = [f"{f.name}:{_name(hints[f.name])}{_default(f)}" for f in msgspec.structs.fields(struct)]
    seen[struct.__name__] = f"{struct.__name__} tag={config.tag} array={config.array_like} {fields}"
    for hint in hints.values():
        _visit(hint, seen)


def _visit(hint: Any, seen: dict[str, str]) -> None:
    if isinstance(hint, type) and issubclass(hint, Struct):
        _describe(hint, seen)
    elif isinstance(hint, type) and issubclass(hint, Enum):
        seen[hint.__name__] = f"{hint.__name__} {[member.value for member in hint]}"
    for inner in get_args(hint):
        _visit(inner, seen)


def _default(field: FieldInfo) -> str:
    """The value that an absent field stands for."""
    if field.required:
        return ""
    return f"={field.default!r}" if field.default_factory is NODEFAULT else f"={field.default_factory()!r}"


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
