"""One client's connection: uvicorn's protocol with limits, fed so that nothing of a body can be taken for a head.

A head is kept until it is whole, and the parser gets pieces that end where a head or a body ends. So what is done to a head never
touches a body, wherever a read ends, and what stands behind one waiting request waits unparsed. Made by server.py's Server, which calls
`check` once a second. It never looks into bodies.
"""

import re
import time
import uuid
from typing import Any, NamedTuple

import httptools
import structlog
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from meshlm.frontend.http.errors import HttpError
from meshlm.runtime.process.logs import Limited

EXTENSION = "meshlm.transport"
MAX_HEADER_BYTES = 64 << 10
MAX_HEADER_FIELDS = 256
MIN_BODY_RATE = 1024  # bytes a second, on the average, of a body that is late: a byte now and then keeps nothing open
LINGER_S = 5.0  # that the rest of a body is read and thrown away, behind the last answer
MAX_UNPARSED_BYTES = 64 << 10  # behind a request that waits for its turn; then reading stops

_BLANK_LINE = b"\r\n\r\n"
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_log = Limited(structlog.get_logger())


def cut_off(transport: Any, reason: str) -> None:
    """End the connection of a client that leaves its answer, and say so: its request's line tells no more than that it was aborted."""
    peer = transport.get_extra_info("peername")
    client = peer[0] if isinstance(peer, tuple) else None
    _log.warning("client cut off", reason=reason, unsent_bytes=transport.get_write_buffer_size(), client=client)
    transport.abort()


class Timeouts(NamedTuple):
    """Seconds that a client may keep its server waiting (`ServerConfig` says for what)."""

    header: float
    body: float
    send: float


class _Flow(FlowControl):
    """Reads on only while there is room for what is not parsed."""

    is_full = False

    def resume_reading(self) -> None:
        if not self.is_full:
            super().resume_reading()


class MeshProtocol(HttpToolsProtocol):
    """A connection. At most one request waits behind the one that is being answered."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        self._unparsed = bytearray()
        self._searched = 0  # so far there is no blank line in it
        self._active: RequestResponseCycle | None = None  # the newest that was begun
        self._in_body = False
        self._body_left = 0  # of a counted body; 0 in a chunked one
        self._is_last = False  # the connection ends with this request: what follows means nothing
        self._lingers_until = 0.0  # the last answer is given, and the rest of its request's body comes; 0: not so
        self._fruitless_bytes = 0  # of a chunked body, since its last data: sizes, extensions, trailers
        self._has_body = False  # some of it came
        self._waits_since = self._heard_at = time.monotonic()
        self._body_due = 0.0  # seconds that its rate grants the body that is coming, after the time-out
        self._body_since = self._waits_since
        self.unsent = 0  # bytes that were written and the client has not taken
        self._taken_at = self._waits_since  # when it last took some

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unparsed.clear()
        if self._active is not None and not self._active.response_complete:  # uvicorn tells the newest cycle alone
            self._active.disconnected = True
            self._active.message_event.set()

    # --- what comes ---

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._heard_at = time.monotonic()
        self._body_due += len(data) / MIN_BODY_RATE
        if not self._unparsed and not self._in_body:
            self._waits_since = self._heard_at
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        """Parses what has come as far as possible, and reads on if there is room."""
        while self._unparsed and not self.pipeline and not self._is_over():
            size = self._whole()
            if not size:
                break
            with memoryview(self._unparsed) as view:
                piece = bytes(view[:size])
            del self._unparsed[:size]
            self._searched = 0
            self._feed(piece)
        if self._is_over():
            self._unparsed.clear()
        self._flow.is_full = len(self._unparsed) > MAX_UNPARSED_BYTES
        if self._flow.is_full:
            self.flow.pause_reading()

    def _is_over(self) -> bool:
        """Whether the connection is over, so that further bytes mean nothing."""
        return self.transport.is_closing() or (self._is_last and not self._in_body)

    def _whole(self) -> int:
        """The number of bytes that may be parsed now: never beyond the end of a head or a body."""
        unparsed = self._unparsed
        if self._body_left:
            return min(self._body_left, len(unparsed))
        if not self._in_body and unparsed[0] in b"\r\n":  # between requests: they mean nothing
            del unparsed[: len(unparsed) - len(unparsed.lstrip(b"\r\n"))]
        if not self._in_body and unparsed and not unparsed[:1].isupper():
            self._refuse(400, "this is no HTTP/1.1 request (TLS is not served)")
            return 0
        found = unparsed.find(_BLANK_LINE, self._searched)
        size = found + len(_BLANK_LINE) if found >= 0 else 0
        self._searched = max(0, len(unparsed) - 3)
        if self._in_body:
            return size or self._searched  # a chunked body ends with a blank line too
        if (size or len(unparsed)) > MAX_HEADER_BYTES:
            self._refuse(431, f"the request's head is longer than {MAX_HEADER_BYTES} bytes")
            return 0
        return size

    def _feed(self, piece: bytes) -> None:
        if self._body_left:
            self._body_left -= len(piece)
        elif self._in_body:
            self._fruitless_bytes += len(piece)
        else:
            if piece.count(b"\n") > MAX_HEADER_FIELDS + 2:
                self._refuse(431, f"the request has more than {MAX_HEADER_FIELDS} header fields")
                return
            piece = _UPGRADE.sub(b"\r\nX-Offered:", piece)  # the request counts, the offer of another protocol does not
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "CONNECT is not served")
        except httptools.HttpParserError as error:
            self._refuse(400, f"this is no valid HTTP/1.1 request: {error.__context__ or error}")
        if self._fruitless_bytes > MAX_HEADER_BYTES:
            self._refuse(431, f"the body's trailers are longer than {MAX_HEADER_BYTES} bytes")

    # --- what the parser found ---

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._body_left = self._fruitless_bytes = 0
        self._in_body = self._has_body = False
        extension: dict[str, object] = {"transport": self.transport, "flow": self.flow, "begun": time.monotonic()}
        self._extension = extension
        self.scope["extensions"] = {EXTENSION: extension}  # type: ignore[dict-item]

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # a trailer means nothing here
        super().on_header(name, value)
        if name.lower() == b"content-length":
            self._body_left = int(value)

    def on_headers_complete(self) -> None:
        if self.parser.get_http_version() not in ("1.0", "1.1"):
            raise ValueError("HTTP/1.0 and HTTP/1.1 are served")
        super().on_headers_complete()
        self._in_body, self._is_last = True, not self.cycle.keep_alive
        self.cycle.keep_alive = True  # on_response_complete ends the connection, not uvicorn
        self._body_since, self._body_due = time.monotonic(), 0.0
        self._extension["cycle"] = self.cycle

    def on_body(self, body: bytes) -> None:
        self._fruitless_bytes, self._has_body = 0, True
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_body, self._body_left, self._fruitless_bytes = False, 0, 0
        self._waits_since = time.monotonic()
        if self._lingers_until:
            self.transport.close()

    # --- what goes ---

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self.expect_100_continue and not self._has_body:
            self.transport.close()  # the client may leave the body out now, and nobody knows where the next request begins
        elif self._is_last and self._active is not None and self._active.response_complete:
            self._end()
        if self._unparsed:
            self._waits_since = time.monotonic()
            self.loop.call_soon(self._parse_on)

    def _end(self) -> None:
        """The last answer is given. A body that comes at a closed connection would reset it, and hide a refusal."""
        if not self._in_body:
            self.transport.close()
        elif not self.transport.is_closing() and not self._lingers_until:
            self._lingers_until = time.monotonic() + LINGER_S
            if self.transport.can_write_eof():  # not with TLS, whose client knows the answer's length
                self.transport.write_eof()

    def _parse_on(self) -> None:
        if not self.transport.is_closing():
            self._parse()
            self.flow.resume_reading()

    def _refuse(self, status: int, message: str) -> None:
        """End the connection, with this answer unless another one has begun."""
        active = self._active
        if active is not None and not self._in_body and not active.response_complete:
            self._is_last, active.keep_alive = True, False  # an earlier request, which still gets its answer
            return
        if self.transport.is_closing():
            return
        if active is None or not self._in_body or not active.response_started:
            body = HttpError(status, message).body()
            name = (b"x-request-id", uuid.uuid4().hex.encode())
            fields = [*self.server_state.default_headers, (b"content-type", b"application/json"), name]
            head = STATUS_LINE[status] + b"".join(b"%b: %b\r\n" % field for field in fields)
            self.transport.write(head + b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        if active is not None:
            active.disconnected = True
            active.message_event.set()
        self.transport.close()

    # --- time ---

    def check(self, now: float, timeouts: Timeouts) -> None:
        """End the connection of a client that sends half of something, or takes nothing."""
        before, self.unsent = self.unsent, self.transport.get_write_buffer_size()
        if self.unsent != before or not before:
            self._taken_at = now
        if now - self._taken_at > timeouts.send:
            cut_off(self.transport, f"it took nothing of its answer for {timeouts.send:g} s (--http-send-timeout)")
        elif self._lingers_until:
            if now > self._lingers_until:
                self.transport.close()
        elif self._in_body:
            if self.flow.read_paused:
                self._heard_at = self._body_since = now  # it is not the client that keeps us waiting
            elif now - self._heard_at > timeouts.body:
                self._refuse(408, f"nothing of the request's body came for {timeouts.body:g} s")
            elif now - self._body_since > timeouts.body + self._body_due:
                self._refuse(408, f"the request's body comes with less than {MIN_BODY_RATE} bytes a second")
        elif (self._active is None or self._active.response_complete) and now - self._waits_since > timeouts.header:
            if self._unparsed:
                self._refuse(408, f"the request's head did not come within {timeouts.header:g} s")
            elif self.timeout_keep_alive_task is None:
                self.transport.close()
