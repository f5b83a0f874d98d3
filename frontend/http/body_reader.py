"""Reads bodies: within the server's limits, and what is large beside the loop. The one place that does."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from starlette.requests import Request

from meshlm.frontend.http import bodies
from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.http.server import ByteBudget
from meshlm.frontend.requests.poison import PoisonBodies, name_of
from meshlm.protocol.config import ServerConfig
from meshlm.runtime.process import in_hand

BODIES = "this server is reading as many bytes of bodies as it may (--max-incoming-bytes)"
FREE_BODY_BYTES = 64 << 10  # a body's first bytes do not count: small requests are served beside large ones
Parsed = TypeVar("Parsed")


class BodyReader:
    """All bodies of one frontend."""

    def __init__(self, server: ServerConfig, poison: PoisonBodies) -> None:
        self._server, self._poison = server, poison
        self._incoming = ByteBudget(server.max_incoming_bytes)
        self.reads_large = asyncio.Lock()

    async def read(self, request: Request, parse: Callable[[Request, bytes], Parsed]) -> Parsed:
        """What `parse`, which changes nothing, makes of the body. Of a large one in a thread, so that no stream waits for it; one after
        the other."""
        async with self.body(request) as raw, self._poison.turn(name := name_of(request.url.path, raw)):
            if len(raw) <= bodies.LARGE_BYTES:
                return in_hand.holding(name, parse, request, raw)
            async with self.reads_large:
                return await asyncio.to_thread(in_hand.holding, name, parse, request, raw)

    @asynccontextmanager
    async def body(self, request: Request, is_json: bool = True) -> AsyncIterator[bytes]:
        """The body, refused as soon as it is too long. It counts as incoming until it is read."""
        if (coding := request.headers.get("content-encoding", "identity").lower()) != "identity":
            raise HttpError(400, f"the body is sent in the content-encoding {coding[:40]!r}; send it as it is")
        limit = self._server.max_body_bytes
        message = f"the body exceeds {limit} bytes (--max-body-bytes)"
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            raise HttpError(413, message)
        chunks, size, held = list[bytes](), 0, 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise HttpError(413, message)
                if size > FREE_BODY_BYTES:
                    if not self._incoming.take(len(chunk)):
                        raise HttpError(503, BODIES, kind="overloaded_error")
                    held += len(chunk)
                chunks.append(chunk)
                if is_json and size - len(chunk) < bodies.BEGINNINGS[0] <= size:
                    async with self.reads_large:  # before all the rest is read
                        await asyncio.to_thread(bodies.check_counts, b"".join(chunks))
            raw = b"".join(chunks)
            chunks.clear()
            yield raw
        finally:
            if held:
                self._incoming.give(held)
