"""Frames and pages on a socket, as protocol/remote_pages.py has them. Blocking; the socket's own timeout is the limit of each wait."""

import socket
import zlib

import msgspec

from meshlm.protocol.edges.kv import KEY_BYTES
from meshlm.protocol.remote_pages import MAX_FRAME_BYTES, SUM_BYTES, Reply, Request
from meshlm.workers.kv.connectors import Page

LENGTH_BYTES = 4
BAD_FRAME = (msgspec.DecodeError, msgspec.ValidationError)
_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


class Broken(Exception):
    """The connection is over, or what came over it is not what was sent; one line."""


def send(to: socket.socket, message: Request | Reply) -> None:
    body = _encode(message)
    to.sendall(len(body).to_bytes(LENGTH_BYTES, "big") + body)


def receive_request(of: socket.socket) -> Request | None:
    """The next request; None when the other side has closed. Broken."""
    body = _frame(of, may_end=True)
    try:
        return None if body is None else _decode_request(body)
    except BAD_FRAME as error:
        raise Broken(f"no request: {error}") from None


def receive_reply(of: socket.socket) -> Reply:
    """Broken."""
    body = _frame(of, may_end=False)
    try:
        return _decode_reply(body or b"")
    except BAD_FRAME as error:
        raise Broken(f"no reply: {error}") from None


def send_page(to: socket.socket, page: Page) -> None:
    to.sendall(page.data)
    to.sendall(zlib.crc32(page.data).to_bytes(SUM_BYTES, "big"))


def receive_page(of: socket.socket, page: Page) -> bool:
    """Fills the page; whether its sum is right. Broken."""
    _fill(of, page.data)
    told = bytearray(SUM_BYTES)
    _fill(of, memoryview(told))
    return zlib.crc32(page.data) == int.from_bytes(told, "big")


def split(keys: bytes) -> list[bytes]:
    """The keys of a column. Broken where it is none."""
    if len(keys) % KEY_BYTES:
        raise Broken(f"{len(keys)} bytes are no keys")
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def _frame(of: socket.socket, *, may_end: bool) -> bytes | None:
    head = bytearray(LENGTH_BYTES)
    if not _fill(of, memoryview(head), may_end=may_end):
        return None
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME_BYTES:
        raise Broken(f"a frame of {length} bytes, and {MAX_FRAME_BYTES} are the most")
    body = bytearray(length)
    _fill(of, memoryview(body))
    return bytes(body)


def _fill(of: socket.socket, place: memoryview, *, may_end: bool = False) -> bool:
    """Reads as many bytes as there is place for. False: the connection ended before the first, which it may."""
    at = 0
    while at < len(place):
        count = of.recv_into(place[at:])
        if not count:
            if may_end and not at:
                return False
            raise Broken("the other side closed the connection")
        at += count
    return True
