"""The wire, byte by byte: one instance of every message against golden.json.

A failure of `test_bytes` means that processes of two versions no longer understand each other. If that is meant:

    .venv/bin/python tests/protocol/support/golden.py --write
"""

import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from golden import defaults, frame, golden, least
from message_parts import DETOKENIZER, LIFE, SCHEDULER
from messages import BY_NAME, EDGES, ENUMS, FULL, NAMES
from msgspec import Struct

from meshlm.protocol.edges import token
from meshlm.protocol.wire import digest, frames
from meshlm.protocol.wire.channels import BY_DIRECTION, CHANNELS, Channel
from meshlm.protocol.wire.ids import Handle

ROOT = Path(__file__).parents[2]


def structs_of(module: ModuleType) -> Iterator[type[Struct]]:
    for _, found in inspect.getmembers(module, inspect.isclass):
        if issubclass(found, Struct) and found.__module__ == module.__name__:
            yield found


def test_every_struct_of_every_edge_is_here_once() -> None:
    known = [type(value) for value in FULL]
    assert len(set(known)) == len(known)
    assert {kind for module in EDGES for kind in structs_of(module)} <= set(known)
    assert {kind for channel in CHANNELS for kind in digest.union_members(channel.messages)} <= set(known)


def test_every_edge_module_is_looked_at() -> None:
    assert {path.stem for path in (ROOT / "protocol" / "edges").glob("*.py")} - {"__init__"} == {
        module.__name__.rpartition(".")[2] for module in EDGES
    }


@pytest.mark.parametrize("name", NAMES)
def test_no_field_is_left_at_its_default(name: str) -> None:
    value = BY_NAME[name]
    for field in msgspec.structs.fields(type(value)):
        if not field.required:
            assert getattr(value, field.name) != getattr(least(value), field.name), field.name


def test_golden_holds_these_messages_and_no_others() -> None:
    assert sorted(golden()) == sorted([*NAMES, *(kind.__name__ for kind in ENUMS), "frame"])


@pytest.mark.parametrize("name", NAMES)
def test_bytes(name: str) -> None:
    stored, value = golden()[name], BY_NAME[name]
    assert msgspec.msgpack.encode(value).hex() == stored["full"]
    assert msgspec.msgpack.encode(least(value)).hex() == stored["least"]
    assert defaults(value) == stored["defaults"]


@pytest.mark.parametrize("kind", ENUMS)
def test_values_of_enums(kind: type[Enum]) -> None:
    """In this order: a frame's header has a role by its number."""
    assert " ".join(str(member.value) for member in kind) == golden()[kind.__name__]["values"]


@pytest.mark.parametrize("name", NAMES)
def test_bytes_mean_what_they_meant(name: str) -> None:
    stored, value = golden()[name], BY_NAME[name]
    assert msgspec.msgpack.decode(bytes.fromhex(stored["full"]), type=type(value)) == value
    assert msgspec.msgpack.decode(bytes.fromhex(stored["least"]), type=type(value)) == least(value)


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: f"{channel.sender.value}-{channel.receiver.value}")
def test_a_channel_decodes_each_of_its_messages(channel: Channel) -> None:
    """As runtime/mesh/mesh.py does: one decoder of the union, on a view of the frame."""
    decode = msgspec.msgpack.Decoder(channel.messages).decode
    of_channel = [
        (name, value) for name, value in BY_NAME.items() if type(value) in digest.union_members(channel.messages)
    ]
    assert len(of_channel) == len(digest.union_members(channel.messages))
    for name, value in of_channel:
        got = decode(memoryview(bytes.fromhex(golden()[name]["full"])))
        assert type(got) is type(value)
        assert got == value


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: f"{channel.sender.value}-{channel.receiver.value}")
@pytest.mark.parametrize("body", [{"type": "nobody's"}, {}, [], 7], ids=str)
def test_a_channel_refuses_what_is_none_of_its_messages(channel: Channel, body: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=channel.messages)


def test_frame() -> None:
    stored = bytes.fromhex(golden()["frame"]["full"])
    assert frame() == stored
    header, body = frames.unpack(stored)
    assert (header.kind, header.sender, header.receiver) == (frames.Kind.DATA, SCHEDULER, DETOKENIZER)
    assert (header.sender_epoch, header.receiver_epoch) == (LIFE, LIFE + 1)
    assert (header.seq, header.ack) == (0x0102_0304_0506_0708, 9)
    channel = BY_DIRECTION[DETOKENIZER.role, SCHEDULER.role]
    assert msgspec.msgpack.decode(body, type=channel.messages) == token.AttachTokens(Handle(3), 21)
