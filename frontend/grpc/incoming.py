"""The messages of clients, each read once its call is let in, within what the frontend may hold, and then decoded. Used by listener.py.

The library reads a message whole and decodes it before a method of its own kind sees the call. So every method is served here as one
with a stream of bytes: of a call that is refused nothing is read but what fits into the window of its stream (64 KiB).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from meshlm.frontend.grpc.servicer import NAME, refuse
from meshlm.frontend.http.bodies import LARGE_BYTES
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.server import ByteBudget
from meshlm.protocol.config import ServerConfig

# Most messages are here by then; what is not counts as long as the longest, since nobody says how long it is.
GRACE_S = 0.2
FREE_BYTES = 64 << 10  # of each message do not count: small ones are served beside large ones
SMALL_BYTES = 64 << 10  # of a message to another service than the engine's
MAX_FIELDS = 131_072  # of a message that is no small one, with those of messages in it; a packed list is one
FULL = "this server is reading as many bytes of messages as it may (--max-incoming-bytes)"
# What each method of the engine takes.
METHODS: dict[str, Descriptor] = {
    f"/{NAME}/{method.name}": method.input_type for method in pb.DESCRIPTOR.services_by_name["VllmEngine"].methods
}

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # types of its stubs, not of the library


def refusing(error: HttpError) -> "Handler":
    """A handler that ends every call with this error, and reads nothing of it."""

    async def end(requests: AsyncIterator[bytes], context: "Context") -> AsyncIterator[bytes]:
        await refuse(context, error)
        yield b""

    return grpc.stream_stream_rpc_method_handler(end)


class Incoming:
    """Reads for all calls of a frontend. `longest` is what the library takes of one message."""

    def __init__(self, server: ServerConfig) -> None:
        self._longest, self._timeout_s = server.max_body_bytes, server.http_body_timeout
        self._budget = ByteBudget(server.max_incoming_bytes)
        self._decodes_large = asyncio.Lock()

    def reading(self, method: str, handler: "Handler") -> "Handler":
        """The same method, whose messages are read here, and whose HttpErrors become gRPC's statuses."""
        decode = handler.request_deserializer
        assert decode is not None
        run: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

        async def serve(_: AsyncIterator[bytes], context: "Context") -> AsyncIterator[Any]:
            try:
                if handler.request_streaming:
                    answer = run(self._each(method, decode, context), context)
                elif (request := await self._next(method, decode, context)) is None:
                    raise HttpError(400, f"{method}: the call brings no message")
                else:
                    answer = run(request, context)
                if hasattr(answer, "__aiter__"):
                    async with contextlib.aclosing(answer):
                        async for message in answer:
                            yield message
                elif (message := await answer) is not None:  # None: it has written its messages itself
                    yield message
            except HttpError as error:
                await refuse(context, error)

        return grpc.stream_stream_rpc_method_handler(serve, response_serializer=handler.response_serializer)

    async def _each(self, method: str, decode: Callable[[bytes], Any], context: "Context") -> AsyncIterator[Any]:
        while (message := await self._next(method, decode, context)) is not None:
            yield message

    async def _next(self, method: str, decode: Callable[[bytes], Any], context: "Context") -> Any:
        """The next message of the call, or None when there is no more. HttpError."""
        async with self._raw(context) as raw:
            if raw is None:
                return None
            kind = METHODS.get(method)
            if kind is None and len(raw) > SMALL_BYTES:
                raise HttpError(413, f"{method}: a message has at most {SMALL_BYTES} bytes")
            try:
                if kind is None or len(raw) <= LARGE_BYTES:
                    return decode(raw)
                async with self._decodes_large:
                    # Counted before it is decoded: an empty text takes two bytes here and sixty in memory.
                    await asyncio.to_thread(check_fields, raw, kind)
                    return await asyncio.to_thread(decode, raw)
            except DecodeError:
                raise HttpError(400, f"{method}: this is no message of this method") from None

    @contextlib.asynccontextmanager
    async def _raw(self, context: "Context") -> AsyncIterator[bytes | None]:
        """A message's bytes, which count until they are decoded; None after the last one. HttpError when it may or does not come."""
        held = 0
        reading = asyncio.ensure_future(context.read())
        try:
            await asyncio.wait({reading}, timeout=GRACE_S)
            if not reading.done():
                held = self._take(self._longest)
                await asyncio.wait({reading}, timeout=self._timeout_s)
            if not reading.done():
                raise HttpError(408, f"the message did not come within {self._timeout_s:g} s")
            raw = reading.result()
            if raw is grpc.aio.EOF:
                yield None
                return
            self._budget.give(held)
            held = 0
            held = self._take(len(raw))
            yield raw
        finally:
            reading.cancel()
            self._budget.give(held)

    def _take(self, num_bytes: int) -> int:
        """What counts of so many bytes. HttpError when there is no room for them."""
        counted = max(0, num_bytes - FREE_BYTES)
        if not self._budget.take(counted):
            raise HttpError(503, FULL, kind="overloaded_error")
        return counted


def check_fields(raw: bytes, kind: Descriptor, most: int = MAX_FIELDS) -> None:
    """HttpError where the message and those in it have more than `most` fields. What cannot be read is the decoder's to refuse."""
    left, waiting = most, [(0, len(raw), kind)]
    while waiting:
        at, end, kind = waiting.pop()
        while at < end:
            left -= 1
            if left < 0:
                raise HttpError(400, f"the message has more than {most} fields; lists of numbers are to be packed")
            tag, at = _varint(raw, at)
            match tag & 7:
                case 0:
                    _, at = _varint(raw, at)
                case 1:
                    at += 8
                case 5:
                    at += 4
                case 2:
                    size, at = _varint(raw, at)
                    field = kind.fields_by_number.get(tag >> 3)
                    if field is not None and field.message_type is not None:
                        waiting.append((at, min(at + size, end), field.message_type))
                    at += size
                case _:  # groups, which proto3 has not
                    raise DecodeError("a group")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number that stands there, and where the next field begins."""
    value = shift = 0
    for byte in raw[at : at + 10]:
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise DecodeError("a number without an end")
