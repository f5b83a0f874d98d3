"""The writer of event streams when its client's socket is full: nothing is lost, nothing overtakes.

Exact orders of events that a real socket shows only at times; tests/mesh/test_bad_clients.py has the real one.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from meshlm.frontend.burst import Burst, Form
from meshlm.frontend.http import EXTENSION, EventWriter


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
        self.num_writes = 0
        self.lost: list[Callable[[], None]] = []
        scope = {"extensions": {EXTENSION: {"transport": self, "flow": self.flow, "lost": self.lost}}}
        self.writer = EventWriter(scope, self._send)

    def text(self) -> bytes:
        """What the client has read, without the sizes of chunks."""
        with contextlib.suppress(BlockingIOError):
            return b"".join(self._clients.recv(100_000).split(b"\r\n")[1::2])
        return b""

    def drain(self) -> bytes:
        """All that the client can read, while what waits follows."""
        found = b""
        while True:
            with contextlib.suppress(BlockingIOError):
                found += self._clients.recv(100_000)
                continue
            if not self._held:
                return found
            held, self._held = self._held, b""
            self.write(held)

    def close(self) -> None:
        self._ours.close()
        self._clients.close()

    # what EventWriter needs of an asyncio.Transport

    def write(self, data: bytes) -> None:
        """As uvloop's: what the socket does not take is held back."""
        self.num_writes += 1
        taken = 0
        if not self._held:
            with contextlib.suppress(BlockingIOError):
                taken = self._ours.send(data)
        self._held += data[taken:]

    def is_closing(self) -> bool:
        return self.gone

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self._ours if name == "socket" and not self.gone else None

    def get_write_buffer_size(self) -> int:
        return len(self._held)

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
    assert connection.lost == []


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
    """As Routes._stream ends: stop the pump, write the last events, finish."""
    pump = await blocked(connection)
    await stop(pump)
    connection.writer.write(b"C")
    connection.flow.resume_writing()
    await connection.writer.finish()
    assert connection.text() == b"ABC"


def burst_of(connection: Connection, count: int = 1) -> Burst:
    return Burst([Form(b"<", b">", connection.writer)] * count)


async def test_texts_are_events_like_others(connection: Connection) -> None:
    """Also while the socket is full, and without a transport."""
    burst = burst_of(connection)
    pump = await blocked(connection)
    burst.send(["C"])
    connection.flow.resume_writing()
    await turn()
    burst.send(["D"])
    burst.send(["E"])
    assert connection.writer._lent
    connection.writer.write(b"F")
    assert connection.writer._lent, "the socket took it"
    burst.send(["G"])
    await stop(pump)
    assert connection.text() == b'AB<"C"><"D"><"E">F<"G">'


async def test_a_socket_that_takes_a_part_gets_the_rest_first(connection: Connection) -> None:
    await connection.writer.start([])
    burst, long, sent = burst_of(connection), "x" * 1500, ["a", "b"]
    burst.send(["a"])
    burst.send(["b"])
    while not connection.get_write_buffer_size():
        sent.append(f"{len(sent)}{long}")
        burst.send([sent[-1]])
        assert len(sent) < 1000
    for text in ("c", "d"):
        sent.append(text)
        burst.send([text])
    assert not connection.writer._lent, "something could overtake what the transport holds back"
    found = connection.drain()
    burst.send(["e"])
    burst.send(["f"])
    assert connection.writer._lent
    events = [f'<"{text}">'.encode() for text in [*sent, "e", "f"]]
    assert found + connection.drain() == b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


async def test_a_lost_connection_is_not_written_to(connection: Connection) -> None:
    """Its descriptor may be another client's already."""
    await connection.writer.start([])
    burst = burst_of(connection)
    burst.send(["a"])
    slots, place = connection.writer._lent[0]
    assert slots[place] is not None
    for tell in connection.lost:
        tell()
    assert slots[place] is None


async def test_a_finished_answer_leaves_nothing_behind(connection: Connection) -> None:
    """The connection goes on to its next request."""
    await connection.writer.start([])
    burst_of(connection).send(["a"])
    assert connection.lost
    await connection.writer.finish()
    assert not connection.lost
    assert not connection.writer._lent
    connection.writer.lend([None], 0)
    assert not connection.writer._lent


async def test_all_choices_of_a_request_go_past_the_transport(connection: Connection) -> None:
    await connection.writer.start([])
    burst = burst_of(connection, 3)
    burst.send(["a", "b", "c"])
    assert connection.num_writes == 3
    burst.send(["d", "", "e"])
    assert connection.text() == b'<"a"><"b"><"c"><"d"><"e">'
    connection.writer.write(b"<end of one>")
    burst.send(["f", "g", "h"])
    assert connection.text() == b'<end of one><"f"><"g"><"h">'
    assert connection.num_writes == 3 + 1, "the end's is the fourth"


async def test_what_is_held_back_of_one_choice_stops_the_others(connection: Connection) -> None:
    """At whichever of them the socket is full, and whoever wrote."""
    await connection.writer.start([])
    burst, long, sent = burst_of(connection, 3), "x" * 700, list[str]()
    for direct in (True, False):
        while not connection.get_write_buffer_size():
            texts = [f"{len(sent) + nth}{long}" for nth in range(3)]
            sent += texts
            if direct:
                burst.send(texts)
            else:
                for text in texts:
                    connection.writer.write(f'<"{text}">'.encode())
        assert not connection.writer._lent
        sent += ["c", "d", "e"]
        burst.send(["c", "d", "e"])
        events = [f'<"{text}">'.encode() for text in sent]
        assert connection.drain() == b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)
        sent.clear()


async def test_choices_of_several_bursts_are_lent_to_one_at_a_time(connection: Connection) -> None:
    """One may be over: nothing is kept for it."""
    await connection.writer.start([])
    found = b""
    for number in range(5):
        burst = burst_of(connection, 2)
        for text in (f"{number}", "b" * 2100, "c" * 2100):  # long ones go through the transport, and are lent once
            burst.send([text, "d"])
            found += connection.drain()
        assert len(connection.writer._lent) == 2
        assert {id(slots) for slots, _ in connection.writer._lent} == {id(burst._direct)}
    assert found.count(b"<") == 5 * 6
