"""The writer of event streams when its client's socket is full: nothing is lost, nothing overtakes.

Exact orders of events that a real socket shows only at times; tests/mesh/test_bad_clients.py has the real one.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from meshlm.frontend.http.connection import EXTENSION
from meshlm.frontend.http.server import ByteBudget, EventWriter


class Flow:
    """uvicorn's FlowControl, in outline."""

    def __init__(self) -> None:
        self._writable = asyncio.Event()
        self._writable.set()
        self.write_paused = False

    async def drain(self) -> None:
        await self._writable.wait()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._writable.set()


class Connection:
    """A started response on a real socket, whose state of being full is what we say."""

    def __init__(self) -> None:
        self.flow = Flow()
        self._ours, self._clients = socket.socketpair()
        self._clients.setblocking(False)
        self._ours.setblocking(False)
        self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self._held = b""
        self.gone = False
        scope = {"extensions": {EXTENSION: {"transport": self, "flow": self.flow, "cycle": None}}}
        self.budget = ByteBudget(40 << 20)
        self.writer = EventWriter(scope, self._send, self.budget)

    def text(self) -> bytes:
        """What the client has read, without the sizes of chunks."""
        with contextlib.suppress(BlockingIOError):
            return b"".join(self._clients.recv(100_000).split(b"\r\n")[1::2])
        return b""

    def close(self) -> None:
        self._ours.close()
        self._clients.close()

    # what EventWriter needs of an asyncio.Transport

    def write(self, data: bytes) -> None:
        """As uvloop's: what the socket does not take is held back."""
        taken = 0
        if not self._held:
            with contextlib.suppress(BlockingIOError):
                taken = self._ours.send(data)
        self._held += data[taken:]

    def abort(self) -> None:
        self.gone = True

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return ("127.0.0.1", 5)

    def get_write_buffer_size(self) -> int:
        return len(self._held)

    def is_closing(self) -> bool:
        return self.gone

    async def _send(self, message: dict[str, Any]) -> None:
        """uvicorn's, in outline."""
        await self.flow.drain()
        if body := message.get("body"):
            self.write(b"%x\r\n%b\r\n" % (len(body), body))


@pytest.fixture
def connection() -> Iterator[Connection]:
    found = Connection()
    yield found
    found.close()


async def turn() -> None:
    """Let every other task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def blocked(connection: Connection) -> "asyncio.Task[None]":
    """The stream has sent A and cannot send B; its pump."""
    await connection.writer.start([])
    pump = asyncio.ensure_future(connection.writer.pump())
    connection.writer.write(b"A")
    connection.flow.pause_writing()
    connection.writer.write(b"B")
    await turn()
    return pump


async def stop(pump: "asyncio.Task[None]") -> None:
    pump.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await pump


async def test_a_response_to_a_client_that_left(connection: Connection) -> None:
    """It left before the first event, and its transport has no socket any more."""
    connection.gone = True
    await connection.writer.start([])
    connection.writer.write(b"A")
    await connection.writer.finish()


async def test_what_waits_is_sent_in_order(connection: Connection) -> None:
    pump = await blocked(connection)
    connection.writer.write(b"C")
    assert connection.text() == b"A"
    connection.flow.resume_writing()
    await turn()
    connection.writer.write(b"D")
    await turn()
    await stop(pump)
    assert connection.text() == b"BCD"


async def test_nothing_overtakes_when_the_socket_has_room_again(connection: Connection) -> None:
    pump = await blocked(connection)
    connection.flow.resume_writing()
    connection.writer.write(b"C")  # before the pump had its turn
    await turn()
    await stop(pump)
    assert connection.text() == b"ABC"


async def test_the_end_of_the_answer_loses_nothing(connection: Connection) -> None:
    """As Generation._stream ends: stop the pump, write the last events, finish."""
    pump = await blocked(connection)
    await stop(pump)
    connection.writer.write(b"C")
    connection.flow.resume_writing()
    await connection.writer.finish()
    assert connection.text() == b"ABC"


async def test_a_client_that_takes_nothing_is_cut_off_at_its_share(connection: Connection) -> None:
    """A quarter of the budget, and all of it is given back."""
    await connection.writer.start([])
    connection.flow.pause_writing()
    event = b"x" * 100_000
    for _ in range(10):
        connection.writer.write(event)
    assert connection.budget.num_bytes == 0, "what most clients leave needs no room"
    for _ in range(94):
        connection.writer.write(event)
    assert connection.budget.num_bytes == 94 * len(event)
    assert not connection.gone
    connection.writer.write(event)
    assert connection.gone
    connection.writer.write(event)
    assert connection.budget.num_bytes == 0
    assert not connection.writer._waiting


async def test_clients_that_take_nothing_share_a_budget(connection: Connection) -> None:
    await connection.writer.start([])
    connection.flow.pause_writing()
    assert connection.budget.take(connection.budget.limit)
    connection.writer.write(b"x" * EventWriter.FREE_BYTES)
    assert not connection.gone
    connection.writer.write(b"x")
    assert connection.gone
    assert connection.budget.num_bytes == connection.budget.limit


async def test_room_is_given_back_when_a_client_takes_what_waits(connection: Connection) -> None:
    await connection.writer.start([])
    connection.flow.pause_writing()
    connection.writer.write(b"x" * (3 << 20))
    assert connection.budget.num_bytes == 3 << 20
    connection.flow.resume_writing()
    await connection.writer.finish()
    assert connection.budget.num_bytes == 0
