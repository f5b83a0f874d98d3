"""link.py by itself: frames come all, in order, whatever the turns of the loop and the errors of the reader."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from meshlm.runtime.mesh import link
from meshlm.runtime.mesh.link import READ_AT_MOST, Inbox, Outbox

LIMIT_S = 10


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as found:
        yield found


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/inbox"


class Reader:
    """Collects frames; `wait` until there are so many."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        self.frames: list[bytes] = []
        self.num_drained = 0
        self.on_frame: Callable[[bytes], None] = lambda frame: None
        self._news = asyncio.Event()
        self.inbox = Inbox(context, address, self._take, self._drained)

    def _take(self, frame: bytes) -> None:
        self.frames.append(frame)
        self._news.set()
        self.on_frame(frame)

    def _drained(self) -> None:
        self.num_drained += 1

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.frames) < count:
                self._news.clear()
                await self._news.wait()


def sent(context: "zmq.Context[zmq.Socket[bytes]]", address: str, frames: list[bytes]) -> None:
    """On their way. As parts of one message they come into the reader's queue at the same time."""
    with context.socket(zmq.PUSH) as sock:
        sock.setsockopt(zmq.LINGER, 1000 * LIMIT_S)
        sock.connect(address)
        sock.send_multipart(frames)


async def test_many_frames_in_order(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
    """More than one turn's worth, those of before the start included."""
    reader = Reader(context, address)
    frames = [b"%d" % number for number in range(5 * READ_AT_MOST + 1)]
    sent(context, address, frames)
    reader.inbox.start(asyncio.get_running_loop())
    await reader.wait(len(frames))
    assert reader.frames == frames
    assert reader.num_drained >= 5
    reader.inbox.close()


async def test_frames_that_take_long_are_read_one_in_a_turn(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 MB of log-probabilities that were told again kept a frontend from its heartbeat for more than 10 s, and it was replaced."""
    monkeypatch.setattr(link, "READ_FOR_S", -1.0)
    reader = Reader(context, address)
    frames = [b"%d" % number for number in range(40)]
    sent(context, address, frames)
    reader.inbox.start(asyncio.get_running_loop())
    await reader.wait(len(frames))
    assert reader.frames == frames
    assert reader.num_drained >= len(frames) - 1
    reader.inbox.close()


async def test_what_the_peer_is_not_there_for_waits(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
    outbox = Outbox(context, address)
    outbox.flush(deque([b"1", b"2"]))
    outbox.flush(deque([b"3"]))
    assert list(outbox.pending) == [b"1", b"2", b"3"]
    reader = Reader(context, address)
    reader.inbox.start(asyncio.get_running_loop())
    async with asyncio.timeout(LIMIT_S):
        while outbox.pending:
            outbox.flush(deque())
            await asyncio.sleep(0)
    outbox.flush(deque([b"4"]))
    await reader.wait(4)
    assert reader.frames == [b"1", b"2", b"3", b"4"]
    reader.inbox.close()
    outbox.close()


async def test_an_app_begins_before_it_is_told_anything(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str
) -> None:
    """What a process does with its mesh: open it, then begin. A message that came in between would find no App, and be lost."""
    reader = Reader(context, address)
    story: list[str] = []

    async def begin() -> None:
        story.append("begun")

    reader.on_frame = lambda frame: story.append("told")
    sent(context, address, [b"early"])
    assert reader.inbox._socket.poll(1000 * LIMIT_S), "it waits"
    reader.inbox.start(asyncio.get_running_loop())
    begins = asyncio.ensure_future(begin())
    await reader.wait(1)
    await begins
    reader.inbox.close()
    assert story == ["begun", "told"]


async def test_closed_before_it_is_read(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
    reader = Reader(context, address)
    with context.socket(zmq.PUSH) as sock:
        sock.setsockopt(zmq.LINGER, 0)  # nobody takes it
        sock.connect(address)
        sock.send(b"late")
        reader.inbox.start(asyncio.get_running_loop())
        reader.inbox.close()
        turns = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, turns.set_result, None)
        await turns
    assert reader.frames == []


async def test_closed_by_what_a_frame_says(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
    reader = Reader(context, address)
    reader.on_frame = lambda frame: reader.inbox.close()
    sent(context, address, [b"1", b"2"])
    reader.inbox.start(asyncio.get_running_loop())
    await reader.wait(1)
    assert reader.frames == [b"1"]


async def test_an_error_does_not_hold_up_the_frames_behind_it(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str
) -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, error: errors.append(error))

    def refuse_first(frame: bytes) -> None:
        if frame == b"1":
            raise ValueError(frame)

    reader = Reader(context, address)
    reader.on_frame = refuse_first
    peer = context.socket(zmq.PUSH)
    peer.connect(address)
    peer.send_multipart([b"1", b"2", b"3"])
    assert reader.inbox._socket.poll(1000 * LIMIT_S)  # all are there, and no edge of the FD is to come
    reader.inbox.start(asyncio.get_running_loop())
    try:
        await reader.wait(1)
        async with asyncio.timeout(0.5):
            await reader.wait(3)
        assert reader.frames == [b"1", b"2", b"3"]
        assert reader.num_drained
    finally:
        peer.close(0)
        reader.inbox.close()


def test_an_inbox_that_cannot_be_bound_leaves_no_socket() -> None:
    """A context with an open socket cannot be ended: the process would wait for that for ever, and its supervisor for the process."""

    def refuse(sock: "zmq.Socket[bytes]") -> str:
        taken.append(sock)
        raise zmq.ZMQError(zmq.EADDRINUSE)

    taken: list[zmq.Socket[bytes]] = []
    with zmq.Context() as context:
        with pytest.raises(zmq.ZMQError):
            Inbox(context, "", lambda frame: None, lambda: None, refuse)
        assert taken[0].closed
