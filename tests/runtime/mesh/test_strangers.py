"""Connections that fail for their keys are said in the log, once in a while; others are not."""

import asyncio
import socket
from collections.abc import Callable, Iterator

import pytest
import zmq

from meshlm.protocol.config import NetworkConfig
from meshlm.runtime.mesh.keys import Keys
from meshlm.runtime.mesh.strangers import Strangers
from meshlm.runtime.mesh.tcp import Tcp

LIMIT_S = 10
OTHER_KEY, NO_CURVE = "it has the key of another mesh (--key-file)", "it speaks ZeroMQ without CURVE"
ACCEPTED, ENDED, FAILED = zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
WRONG_KEY = zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []
        self.news = asyncio.Event()

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append({"event": event, **fields})
        self.news.set()


class Door:
    """A watched socket with CURVE, and what comes to it."""

    def __init__(self) -> None:
        self.keys = Keys(*zmq.curve_keypair())
        self.log = Log()
        self.strangers = Strangers(self.log)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inbox = self.context.socket(zmq.PULL)
        self.address = ""

    def open(self) -> None:
        self.strangers.watch(self.inbox, asyncio.get_running_loop())
        self.address = Tcp("127.0.0.1", self.keys, NetworkConfig()).bind(self.inbox)

    def come(self, keys: Keys | None) -> "zmq.Socket[bytes]":
        sock = self.context.socket(zmq.PUSH)
        sock.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            Tcp("127.0.0.1", keys, NetworkConfig()).prepare(sock)
        sock.connect(self.address)
        return sock


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.inbox.close(0)
    made.strangers.close()
    made.context.destroy(0)


async def failures(door: Door, count: int) -> None:
    """Until so many connections have failed."""
    seen, done = 0, asyncio.Event()
    take = door.strangers.take

    def taken(events: list[tuple[int, int]], address_of: Callable[[int], str]) -> None:
        nonlocal seen
        take(events, address_of)
        seen += sum(kind == FAILED for kind, _ in events)
        if seen >= count:
            done.set()

    door.strangers.take = taken  # type: ignore[method-assign]
    await asyncio.wait_for(done.wait(), LIMIT_S)


@pytest.mark.parametrize("reason", [OTHER_KEY, NO_CURVE])
async def test_a_stranger_is_said_once_however_often_it_tries(door: Door, reason: str) -> None:
    door.open()
    sock = door.come(Keys(*zmq.curve_keypair()) if reason == OTHER_KEY else None)
    await failures(door, 3 if reason == OTHER_KEY else 1)  # without CURVE libzmq does not try again
    await asyncio.wait_for(door.log.news.wait(), LIMIT_S)  # it is said when the connection has ended
    sock.close(0)
    (line,) = door.log.lines
    assert (line["event"], line["reason"]) == ("connection refused", reason)
    assert line.get("address", "127.0.0.1") == "127.0.0.1"


async def test_members_and_probes_are_not_said(door: Door) -> None:
    door.open()
    host, port = door.address.removeprefix("tcp://").split(":")
    for words in (b"", b"GET / HTTP/1.0\r\n\r\n"):
        with socket.create_connection((host, int(port))) as probe:
            probe.sendall(words)
    door.come(door.keys).close(0)
    stranger = door.come(None)
    await asyncio.wait_for(door.log.news.wait(), LIMIT_S)
    stranger.close(0)
    assert [line["reason"] for line in door.log.lines] == [NO_CURVE], "it came last"


def test_the_address_of_the_connection_that_failed(door: Door) -> None:
    """Several connections at once; one thread ends each right after it has failed."""
    where = {7: "10.0.0.7", 8: "10.0.0.8"}
    events: list[tuple[int, int]] = [(ACCEPTED, 7), (ACCEPTED, 8), (FAILED, WRONG_KEY), (ENDED, 8), (ENDED, 7)]
    door.strangers.take(events, lambda descriptor: where[descriptor])
    assert door.log.lines == [{"event": "connection refused", "address": "10.0.0.8", "reason": OTHER_KEY}]


def test_a_connection_may_fail_and_end_in_two_readings(door: Door) -> None:
    door.strangers.take([(ACCEPTED, 7), (FAILED, WRONG_KEY)], lambda descriptor: "10.0.0.7")
    assert door.log.lines == []
    door.strangers.take([(ENDED, 7), (ACCEPTED, 8), (ENDED, 8)], lambda descriptor: "10.0.0.8")
    assert door.log.lines == [{"event": "connection refused", "address": "10.0.0.7", "reason": OTHER_KEY}]


def test_an_address_that_was_gone_is_left_out(door: Door) -> None:
    door.strangers.take([(ACCEPTED, 7), (FAILED, WRONG_KEY), (ENDED, 7)], lambda descriptor: "")
    assert door.log.lines == [{"event": "connection refused", "reason": OTHER_KEY}]
