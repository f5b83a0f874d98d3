"""How golden.json holds the messages.

.venv/bin/python tests/protocol/support/golden.py --write
"""

import json
import sys
from pathlib import Path

import msgspec
from message_parts import DETOKENIZER, LIFE, SCHEDULER
from messages import BY_NAME, ENUMS
from msgspec import Struct

from meshlm.protocol.edges import token
from meshlm.protocol.wire import frames
from meshlm.protocol.wire.ids import Handle, Incarnation

GOLDEN = Path(__file__).parents[1] / "golden.json"


def frame() -> bytes:
    """A whole frame: header and a message, as the socket carries it."""
    header = frames.Header(
        frames.Kind.DATA, SCHEDULER, DETOKENIZER, LIFE, Incarnation(LIFE + 1), 0x0102_0304_0506_0708, 9
    )
    return frames.pack(header, msgspec.msgpack.encode(token.AttachTokens(Handle(3), 21)))


def least(value: Struct) -> Struct:
    """The same message with nothing but its required fields."""
    fields = msgspec.structs.fields(type(value))
    return type(value)(**{field.name: getattr(value, field.name) for field in fields if field.required})


def defaults(value: Struct) -> str:
    """What the fields mean that are not there."""
    found = least(value)
    optional = [field.name for field in msgspec.structs.fields(type(value)) if not field.required]
    return ", ".join(f"{name}={getattr(found, name)!r}" for name in optional)


def encoded() -> dict[str, dict[str, str]]:
    """What golden.json holds: the message with all its fields and with the required ones only; values of enums."""
    messages = {
        name: {
            "full": msgspec.msgpack.encode(value).hex(),
            "least": msgspec.msgpack.encode(least(value)).hex(),
            "defaults": defaults(value),
        }
        for name, value in BY_NAME.items()
    }
    enums = {kind.__name__: {"values": " ".join(str(member.value) for member in kind)} for kind in ENUMS}
    return {**messages, **enums, "frame": {"full": frame().hex()}}


def golden() -> dict[str, dict[str, str]]:
    return msgspec.json.decode(GOLDEN.read_bytes(), type=dict[str, dict[str, str]])


def write() -> None:
    GOLDEN.write_text(json.dumps(encoded(), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(__doc__)
    write()
    print(f"{GOLDEN}: {len(BY_NAME)} messages")
