"""The bytes on the wire: a fixed header, then one msgpack message.

    magic 2 | version 1 | kind 1 | sender role 1 | receiver role 1 | sender index 2 | receiver index 2 | pad 6 |
    sender incarnation 8 | receiver incarnation 8 (0: unknown) | seq 8 | ack 8

Little-endian, 48 bytes. `seq` numbers DATA frames of one (sender incarnation, receiver incarnation) pair from 1; `ack` is the last
seq received in order from the other side, on every frame. A malformed frame raises FrameError, never anything else.
"""

import struct
from enum import IntEnum
from typing import NamedTuple

from meshlm.protocol.wire.ids import Identity, Incarnation, Role

MAGIC = b"ML"
VERSION = 1
_HEADER = struct.Struct("<2sBBBBHH6xQQQQ")
HEADER_BYTES = _HEADER.size

_ROLES = tuple(Role)
_ROLE_NUMBER = {role: number for number, role in enumerate(_ROLES)}
_KINDS: dict[int, "Kind"] = {}
_identities: dict[int, Identity] = {}  # role << 16 | index: one object each, so that hashes are computed once


class FrameError(ValueError):
    """These bytes are no frame of ours; the text says why. They are logged and dropped."""


class Kind(IntEnum):
    """The purpose of a frame."""

    HELLO = 1  # opens a session; body: schema digest. Repeated on a timer until WELCOME
    WELCOME = 2  # answers HELLO; body: schema digest
    DATA = 3  # body: one message of the channel
    ACK = 4  # no body: the header's ack is the news
    REFUSE = 5  # body: UTF-8 text, why there will be no session
    BYE = 6  # no body: the sender ends. Between nodes, where no pidfd tells it


_KINDS.update({kind.value: kind for kind in Kind})


class Header(NamedTuple):
    kind: Kind
    sender: Identity
    receiver: Identity
    sender_epoch: Incarnation
    receiver_epoch: Incarnation
    seq: int
    ack: int


def pack(header: Header, body: bytes = b"") -> bytes:
    """Header + body as one frame."""
    return (
        _HEADER.pack(
            MAGIC,
            VERSION,
            header.kind,
            _ROLE_NUMBER[header.sender.role],
            _ROLE_NUMBER[header.receiver.role],
            header.sender.index,
            header.receiver.index,
            header.sender_epoch,
            header.receiver_epoch,
            header.seq,
            header.ack,
        )
        + body
    )


FRAME_PREFIX_BYTES = 32  # up to the numbers
_NUMBERS = struct.Struct("<QQ")
pack_numbers = _NUMBERS.pack  # seq, ack: what follows a frame_prefix in the header
unpack_numbers = _NUMBERS.unpack_from


def data_frame_prefix(sender: Identity, epoch: Incarnation, receiver: Identity, to_epoch: Incarnation) -> bytes:
    """The first FRAME_PREFIX_BYTES of every DATA frame from this epoch to that one."""
    return pack(Header(Kind.DATA, sender, receiver, epoch, to_epoch, 0, 0))[:FRAME_PREFIX_BYTES]


def unpack(frame: bytes) -> tuple[Header, memoryview]:
    """Header and body of a frame. FrameError when it is none."""
    if len(frame) < HEADER_BYTES:
        raise FrameError(f"{len(frame)} bytes are shorter than a header")
    magic, version, kind, role, to_role, index, to_index, epoch, to_epoch, seq, ack = _HEADER.unpack_from(frame)
    if magic != MAGIC or version != VERSION:
        raise FrameError(f"not a frame of version {VERSION}")
    if not (kind in _KINDS and role < len(_ROLES) and to_role < len(_ROLES)):
        raise FrameError(f"kind {kind} or roles {role}, {to_role} unknown")
    header = Header(
        _KINDS[kind],
        _identities.get(role << 16 | index) or _intern(role, index),
        _identities.get(to_role << 16 | to_index) or _intern(to_role, to_index),
        Incarnation(epoch),
        Incarnation(to_epoch),
        seq,
        ack,
    )
    return header, memoryview(frame)[HEADER_BYTES:]


def sender_key(identity: Identity) -> bytes:
    """The bytes that `sender_of` gives for this process's frames."""
    return struct.pack("<BH", _ROLE_NUMBER[identity.role], identity.index)


def sender_of(frame: bytes) -> bytes:
    """The sender's key of a frame, read without the rest; any bytes where it is no frame."""
    return frame[4:5] + frame[6:8]


def _intern(role: int, index: int) -> Identity:
    return _identities.setdefault(role << 16 | index, Identity(_ROLES[role], index))
