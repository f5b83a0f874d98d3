"""A connection fed by hand: the same requests however their bytes are split, limits on all that a client may send or leave out."""

import asyncio
import time
from typing import Any

import pytest
from connections import LIMITS, App, Clock, Connection
from hypothesis import given, settings
from hypothesis import strategies as st

from meshlm.frontend.http import connection as connection_module
from meshlm.frontend.http.connection import MAX_HEADER_BYTES, MAX_UNPARSED_BYTES


def request(method: str, path: str, body: bytes, is_chunked: bool, fields: list[bytes]) -> bytes:
    head = b"%b %b HTTP/1.1\r\n" % (method.encode(), path.encode())
    head += b"".join(field + b"\r\n" for field in fields)
    if not body:
        return head + b"\r\n"
    if not is_chunked:
        return head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    middle = len(body) // 2
    chunks = [body[:middle], body[middle:]] if middle else [body]
    sent = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + sent + b"0\r\nUpgrade: trailer\r\n\r\n"


OFFER = [b"Connection: Upgrade, HTTP2-Settings", b"upGRADE: h2c", b"HTTP2-Settings: x"]
MORE = (b"GET / HTTP/1.1\r\n\r\n", b"a", b"\x00", b"0\r\n\r\n")
BODIES = st.lists(
    st.sampled_from(
        [
            b"\r\n\r\n",
            b"\r\n",
            b"\nUpgrade: x",
            b"\r\nupgrade: h2c\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"a",
            b"\x00",
            b"0\r\n\r\n",
        ]
    ),
    max_size=5,
).map(b"".join)
REQUESTS = st.lists(
    st.tuples(BODIES, st.booleans(), st.sampled_from([[], OFFER, [b"X: upgrade:"]]), st.integers(0, 2)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(REQUESTS, st.lists(st.integers(0, 1000), max_size=12))
def test_any_split_gives_the_same_requests(asked: list[tuple[bytes, bool, list[bytes], int]], cuts: list[int]) -> None:
    stream, expected = b"", []
    for number, (body, is_chunked, fields, blank_lines) in enumerate(asked):
        stream += b"\r\n" * blank_lines + request("POST", f"/{number}", body, is_chunked, fields)
        expected.append(("POST", f"/{number}", body))
    places = sorted({cut % (len(stream) + 1) for cut in cuts})
    parts = [stream[a:b] for a, b in zip([0, *places], [*places, len(stream)], strict=True) if a != b]

    async def play() -> None:
        connection = await Connection().feed(*parts)
        requests = connection.app.requests
        assert [(method, path, body) for method, path, _, body in requests] == expected
        assert not any(name == b"upgrade" for _, _, headers, _ in requests for name, _ in headers)
        answers = b"".join(b"\r\n\r\n%d" % (number + 1) for number in range(len(asked)))
        assert (
            b"".join(b"\r\n\r\n" + part[:1] for part in connection.transport.written.split(b"\r\n\r\n")[1:]) == answers
        )
        await connection.end()

    asyncio.run(play())


async def test_a_body_is_never_rewritten_where_a_read_ends_in_the_blank_line() -> None:
    """It was, when the rest of the blank line came with the body."""
    body = b'{"a": "\nUpgrade: x\nupgrade:y"}\r\n\r\n'
    data = request("POST", "/", body, False, [])
    gap = data.index(b"\r\n\r\n")
    for cut in range(gap, gap + 6):
        connection = await Connection().feed(data[:cut], data[cut:])
        assert [found for *_, found in connection.app.requests] == [body], cut
        await connection.end()


# --- pipelines ---


async def feed_seconds(num_heads: int) -> float:
    """CPU of this thread until all that many requests in one pipeline are answered."""
    connection = Connection()
    data = b"GET / HTTP/1.1\r\n\r\n" * num_heads
    begun = time.thread_time()
    for at in range(0, len(data), 256 << 10):
        connection.protocol.data_received(data[at : at + (256 << 10)])
    await connection.answered(num_heads)
    used = time.thread_time() - begun
    await connection.end()
    return used


async def test_pipelined_heads_cost_linear_time() -> None:
    """Each head was joined with all that follows: four times as many took sixteen times as long."""
    await feed_seconds(200)
    few = min([await feed_seconds(1500) for _ in range(3)])
    many = min([await feed_seconds(6000) for _ in range(3)])
    assert many < 8 * few, (few, many)


async def test_a_pipeline_waits_unparsed() -> None:
    connection = Connection()
    connection.app.go.clear()
    data = b"GET / HTTP/1.1\r\n\r\n" * 12_000
    await connection.feed(data[:1000], *[data[at : at + 20_000] for at in range(1000, 201_000, 20_000)])
    assert connection.app.num_begun == 1
    assert len(connection.protocol.pipeline) == 1
    assert not connection.transport.reading, "what waits has no limit"
    await connection.feed(data[201_000:])  # a transport may still have had it
    connection.app.go.set()
    await connection.answered(12_000)
    assert connection.transport.reading
    assert connection.transport.written.count(b"HTTP/1.1 200") == 12_000
    await connection.end()


async def test_reading_goes_on_behind_a_waiting_request_so_that_a_hang_up_is_seen() -> None:
    connection = Connection()
    connection.app.go.clear()
    await connection.feed(b"GET / HTTP/1.1\r\n\r\n" * 3)
    assert connection.transport.reading
    assert len(connection.protocol._unparsed) < MAX_UNPARSED_BYTES
    await connection.end()


async def test_a_hang_up_is_told_to_the_request_that_is_served() -> None:
    class Waits(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            self.num_begun += 1
            while (await receive())["type"] != "http.disconnect":
                pass
            self.num_gone += 1

    connection = await Connection(Waits()).feed(b"GET / HTTP/1.1\r\n\r\n" * 3)
    connection.protocol.connection_lost(None)
    await connection.settle()
    assert (connection.app.num_begun, connection.app.num_gone) == (1, 1)


# --- what is refused ---

POST = b"POST / HTTP/1.1\r\n"
BAD: dict[str, tuple[int, bytes]] = {
    "length and chunks": (400, POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    "chunks and length": (400, POST + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n"),
    "two lengths": (400, POST + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde"),
    "the same length twice": (400, POST + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\nabcd"),
    "a list of lengths": (400, POST + b"Content-Length: 4, 4\r\n\r\nabcd"),
    "a signed length": (400, POST + b"Content-Length: +4\r\n\r\nabcd"),
    "chunks that are not last": (400, POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n"),
    "an encoding without chunks": (400, POST + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n"),
    "a chunk of 2^68 bytes": (400, POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n\r\n"),
    "a length in a trailer": (400, POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: 9\r\n\r\n"),
    "a folded field": (400, b"GET / HTTP/1.1\r\nHost: x\r\n y\r\n\r\n"),
    "a space before the colon": (400, b"GET / HTTP/1.1\r\nHost : x\r\n\r\n"),
    "a NUL": (400, b"GET / HTTP/1.1\r\nHost: \0\r\n\r\n"),
    "bare LF in a head": (400, b"GET / HTTP/1.1\r\nHost: x\nX: y\r\n\r\n"),
    "no HTTP": (400, b"\x16\x03\x01\x02\r\n\r\n"),
    "HTTP/0.9": (400, b"GET /\r\n\r\n"),
    "HTTP/2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "CONNECT": (400, b"CONNECT a:80 HTTP/1.1\r\n\r\n"),
    "a path that is none": (400, b"GET /\xff HTTP/1.1\r\n\r\n"),
    "a long field": (431, b"GET / HTTP/1.1\r\nX: " + b"x" * MAX_HEADER_BYTES),
    "a long target": (431, b"GET /" + b"x" * MAX_HEADER_BYTES),
    "many fields": (431, b"GET / HTTP/1.1\r\n" + b"x:\r\n" * 300 + b"\r\n"),
    "long trailers": (431, POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 20_000),
    "a long extension": (431, POST + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 2 * MAX_HEADER_BYTES),
}


@pytest.mark.parametrize(("status", "data"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("size", [1 << 20, 997])
async def test_what_is_no_request_is_refused_and_ends_the_connection(status: int, data: bytes, size: int) -> None:
    connection = await Connection().feed(*[data[at : at + size] for at in range(0, len(data), size)])
    head, _, body = connection.transport.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in head
    assert b'"invalid_request_error"' in body
    assert connection.transport.closing
    assert connection.app.requests == []
    await connection.end()


async def test_what_is_wrong_behind_a_request_does_not_spoil_its_answer() -> None:
    connection = Connection()
    connection.app.go.clear()
    await connection.feed(b"GET / HTTP/1.1\r\n\r\nnonsense\r\n\r\n")
    assert connection.transport.written == b""
    connection.app.go.set()
    await connection.settle()
    assert connection.transport.written.count(b"HTTP/1.1") == 1
    assert b"HTTP/1.1 200" in connection.transport.written
    assert connection.transport.closing
    await connection.end()


async def test_what_follows_the_last_request_means_nothing() -> None:
    connection = Connection()
    connection.app.go.clear()
    await connection.feed(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", *[b"x" * 100_000] * 3)
    assert len(connection.protocol._unparsed) == 0
    connection.app.go.set()
    await connection.settle()
    assert b"HTTP/1.1 200" in connection.transport.written
    assert connection.transport.closing
    await connection.end()


GOOD: dict[str, tuple[bytes, str, bytes]] = {
    "absolute form": (b"GET http://a.b:80/v1/models?x=%00 HTTP/1.1\r\n\r\n", "/v1/models", b""),
    "percent": (b"GET /v1/%6dodels HTTP/1.1\r\n\r\n", "/v1/models", b""),
    "percent that is no UTF-8": (b"GET /%ff HTTP/1.1\r\n\r\n", "/\ufffd", b""),
    "trailers and extensions": (
        POST + b"Transfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0;x\r\nT: v\r\n\r\n",
        "/",
        b"abc",
    ),
    "HTTP/1.0": (b"POST / HTTP/1.0\r\nContent-Length: 3\r\n\r\nabc", "/", b"abc"),
    "blank lines before": (b"\r\n\n\r\nGET / HTTP/1.1\r\n\r\n", "/", b""),
}


@pytest.mark.parametrize(("data", "path", "body"), GOOD.values(), ids=GOOD)
async def test_unusual_requests(data: bytes, path: str, body: bytes) -> None:
    for size in (1, len(data)):
        connection = await Connection().feed(*[data[at : at + size] for at in range(0, len(data), size)])
        (request,) = connection.app.requests
        assert (request[1], request[3]) == (path, body)
        assert b"HTTP/1.1 200" in connection.transport.written
        await connection.end()


# --- time ---


async def test_half_a_head_is_waited_for_so_long() -> None:
    connection = await Connection().feed(b"GET / HTTP/1.1\r\nHo")
    connection.check(LIMITS.header - 1)
    assert not connection.transport.closing
    await connection.feed(b"s")  # byte by byte is no way around it
    connection.check(LIMITS.header + 0.1)
    assert b"HTTP/1.1 408" in connection.transport.written
    assert connection.transport.closing
    await connection.end()


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
async def test_a_connection_without_a_request_is_closed(sent: bytes) -> None:
    connection = Connection()
    if sent:
        await connection.feed(sent)
    connection.check(LIMITS.header + 0.1)
    assert connection.transport.closing
    assert connection.transport.written == b""
    await connection.end()


@pytest.mark.parametrize("sent", [b"Content-Length: 9\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"])
async def test_half_a_body_is_waited_for_so_long(sent: bytes) -> None:
    connection = await Connection().feed(POST + sent)
    connection.check(LIMITS.body - 1)
    assert not connection.transport.closing
    connection.check(LIMITS.body + 0.1)
    assert b"HTTP/1.1 408" in connection.transport.written
    assert connection.transport.closing
    await connection.settle()
    assert connection.app.num_gone == 1
    await connection.end()


async def test_a_body_that_falls_silent_is_not_waited_for_by_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rate would grant it a second for each KiB that it sent at once."""
    clock = Clock()
    monkeypatch.setattr(connection_module, "time", clock)
    connection = await Connection().feed(POST + b"Content-Length: 1000000\r\n\r\n", *[b"x" * 10_000] * 50)
    connection.protocol.check(clock.now, LIMITS)
    assert not connection.protocol.flow.read_paused
    clock.now += LIMITS.body + 0.1
    connection.protocol.check(clock.now, LIMITS)
    assert b"HTTP/1.1 408" in connection.transport.written
    assert connection.transport.closing
    await connection.end()


async def test_a_byte_now_and_then_keeps_no_body_open(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(connection_module, "time", clock)
    drip, steady = Connection(), Connection()
    for one in (drip, steady):
        await one.feed(POST + b"Content-Length: 1000000\r\n\r\n")
    for _ in range(10):
        clock.now += LIMITS.body - 1
        for one, data in ((drip, b"x"), (steady, b"x" * 8000)):
            if not one.transport.closing:
                await one.feed(data)
            one.protocol.check(clock.now, LIMITS)
    assert b"HTTP/1.1 408" in drip.transport.written
    assert drip.transport.closing
    assert not steady.transport.closing
    await drip.end()
    await steady.end()


async def test_a_request_that_is_served_may_take_its_time() -> None:
    connection = Connection()
    connection.app.go.clear()
    await connection.feed(b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nhalf of a second one:")
    connection.check(1e6)
    assert not connection.transport.closing
    connection.app.go.set()
    await connection.settle()
    connection.check(LIMITS.header - 1)
    assert not connection.transport.closing
    connection.check(LIMITS.header + 0.1)
    assert b"HTTP/1.1 408" in connection.transport.written
    await connection.end()


async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    connection = await Connection().feed(b"GET / HTTP/1.1\r\n\r\n")
    connection.transport.unsent = 1000
    for after_s, unsent in ((0, 1000), (8, 1000), (9.5, 900), (18, 900)):
        connection.transport.unsent = unsent
        connection.check(after_s)
        assert not connection.transport.aborted, after_s
    connection.check(19)
    assert connection.transport.aborted
    await connection.end()


async def refuses(scope: Any, receive: Any, send: Any) -> None:
    """An application that looks at no body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


refuses.num_begun, refuses.requests = 0, []  # type: ignore[attr-defined]
LAST = {
    "close": POST + b"Connection: close\r\nContent-Length: 300000\r\n\r\n",
    "HTTP/1.0": b"POST / HTTP/1.0\r\nContent-Length: 300000\r\n\r\n",
}


@pytest.mark.parametrize("head", LAST.values(), ids=LAST)
async def test_an_answer_before_the_body_is_not_lost_with_the_connection(head: bytes) -> None:
    """What came at the closed connection reset it: a client with a large body and `Connection: close` saw no 503, but an error."""
    connection = await Connection(refuses).feed(head + b"x" * 100_000)
    assert b"HTTP/1.1 401" in connection.transport.written
    assert connection.transport.ended
    assert not connection.transport.closing
    await connection.feed(b"x" * 100_000)
    connection.check(1.0)
    assert not connection.transport.closing
    assert connection.transport.reading
    await connection.feed(b"x" * 100_000)
    assert connection.transport.closing
    assert connection.transport.written.count(b"HTTP/1.1") == 1
    await connection.end()


async def test_the_rest_of_a_body_is_not_waited_for_long() -> None:
    connection = await Connection(refuses).feed(LAST["close"] + b"x")
    connection.check(connection_module.LINGER_S - 1)
    assert not connection.transport.closing
    connection.check(connection_module.LINGER_S + 1)
    assert connection.transport.closing
    await connection.end()


async def test_who_was_never_told_to_send_a_body_may_leave_it_out() -> None:
    """So nobody knows where the next request begins."""

    connection = await Connection(refuses).feed(POST + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n")
    assert b"HTTP/1.1 401" in connection.transport.written
    assert connection.transport.closing
    await connection.end()


async def test_a_client_that_asks_first_is_told_to_send() -> None:
    connection = await Connection().feed(POST + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n", b"abc")
    assert connection.transport.written.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200")
    assert not connection.transport.closing
    await connection.end()
