"""The sockets that publish the events of one rank's prefix cache, and answer those who missed some. Owned by io.py.

A PUB socket never waits: a subscriber that is slow misses what does not fit into its queue, and sees it by the numbers. A ROUTER socket
gives it the batches that are still kept, a few in each turn of the loop, so that no step waits for a long replay. Subscribers of an
earlier scheduler need a moment to come back, so what a new one says first waits for them. With --grpc the frontends of this node hear
the same at sockets in the run directory, each named after the scheduler's incarnation.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import zmq
from msgspec import Struct

from meshlm.protocol.config import KVEventsConfig
from meshlm.protocol.kv_events import (
    END_OF_REPLAY,
    SEQUENCE_BYTES,
    KVEvent,
    KVEventBatch,
    LocalSockets,
    address_of_rank,
    encode,
    is_bound,
)
from meshlm.runtime.errors import ProcessFatal

COMING_BACK_S = 1.0  # a subscriber tries again every 0.1 s
MAX_KEPT_BYTES = 64 << 20  # of batches for replays
BATCHES_A_TURN = 64  # of replays
REPLAY_HWM = 1000  # batches on their way to a client
SLOW_S, GIVEN_UP_S = 0.02, 10.0  # when a client that takes nothing is tried again, and left alone
MAX_REQUEST_BYTES = 4096  # of a frame that somebody sends here
MAX_REPLAYS = 64  # that wait; who asks beyond them asks again
Socket = zmq.Socket[bytes]


class Place(Struct, frozen=True):
    """Where a rank publishes. `local`: for the frontends of this node; None: they do not ask."""

    rank: int
    local: LocalSockets | None = None


class Replay:
    """One that is being answered: to whom, from which number on and up to which, and how often it could take nothing."""

    __slots__ = ("client", "end", "next", "num_waits")

    def __init__(self, client: bytes, begin: int, end: int) -> None:
        self.client, self.next, self.end, self.num_waits = client, begin, end, 0


class KVPublisher:
    """`publish` numbers the batches from 0 on. `address` is this rank's. ProcessFatal for one that cannot be had."""

    def __init__(self, config: KVEventsConfig, place: Place, clock: Callable[[], float]) -> None:
        self._config, self._place, self._clock = config, place, clock
        self.address = address_of_rank(config.endpoint, place.rank)
        self._topic = config.topic.encode()
        self._next = 0
        self._waiting: deque[tuple[int, bytes]] | None = deque(maxlen=config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._kept_bytes = 0
        self._replays: deque[Replay] = deque()
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context[Socket]()
        try:
            local = place.local or LocalSockets("", "")
            self._pub = self._socket(zmq.PUB, config.hwm, config.endpoint, local.pub)
            self._router: Socket | None = None
            if config.replay_endpoint or local.replay:
                self._router = self._socket(zmq.ROUTER, REPLAY_HWM, config.replay_endpoint, local.replay)
                self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # it says what it cannot send
        except ProcessFatal:
            self._context.destroy(0)
            raise
        self._loop.call_later(COMING_BACK_S, self._begin)
        if self._router is not None:
            self._loop.add_reader(self._router.FD, self._read)
            self._loop.call_soon(self._read)

    def _socket(self, kind: int, most: int, address: str, local: str) -> Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, most)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        if "[" in address or "::" in address:
            socket.setsockopt(zmq.IPV6, 1)
        own = address_of_rank(address, self._place.rank)
        for one in filter(None, (own, local)):
            try:
                if one == local or kind == zmq.ROUTER or is_bound(address):  # the port of a replay is always its own
                    socket.bind(one)
                else:
                    socket.connect(one)
            except zmq.ZMQError as error:
                socket.close(0)
                raise ProcessFatal(f"--kv-events-config: {one}: {zmq.strerror(error.errno or 0)}") from None
        return socket

    def publish(self, events: list[KVEvent]) -> None:
        """One batch, now."""
        batch = KVEventBatch(self._clock(), events, self._place.rank)
        numbered = (self._next, encode(batch, self._config.encoding))
        self._next += 1
        if self._router is not None:
            self._keep(numbered)
        if self._waiting is not None:
            self._waiting.append(numbered)
        else:
            self._send(*numbered)

    def _begin(self) -> None:
        waiting, self._waiting = self._waiting, None
        for numbered in waiting or ():
            self._send(*numbered)

    def _send(self, number: int, payload: bytes) -> None:
        if not self._pub.closed:
            self._pub.send_multipart((self._topic, number.to_bytes(SEQUENCE_BYTES, "big"), payload), zmq.NOBLOCK)

    def _keep(self, numbered: tuple[int, bytes]) -> None:
        kept = self._kept
        self._kept_bytes += len(numbered[1])
        while kept and (self._kept_bytes > MAX_KEPT_BYTES or len(kept) == kept.maxlen):
            self._kept_bytes -= len(kept.popleft()[1])
        kept.append(numbered)

    # --- replays ---

    def _read(self) -> None:
        """Takes the requests that are there. The FD is edge-triggered: stopping early needs another turn."""
        if self._router is None or self._router.closed:
            return
        for _ in range(MAX_REPLAYS):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 3 or frames[1] or not 1 <= len(frames[2]) <= SEQUENCE_BYTES:
                continue  # no request of this protocol
            if len(self._replays) < MAX_REPLAYS:
                self._replays.append(Replay(frames[0], int.from_bytes(frames[2], "big"), self._next))
                if len(self._replays) == 1:
                    self._loop.call_soon(self._answer)
        self._loop.call_soon(self._read)

    def _answer(self) -> None:
        """The next batches of a replay, or its end; then it is another's turn."""
        if self._router is None or self._router.closed:
            return
        replay = self._replays.popleft()
        if goes_on := self._go_on(replay):
            self._replays.append(replay)
        if self._replays:
            delay_s = SLOW_S if goes_on and replay.num_waits else 0.0
            self._loop.call_later(delay_s, self._answer)
        self._read()  # sending may have taken the FD's edge

    def _go_on(self, replay: Replay) -> bool:
        """Whether more is to be sent: not to a client that is gone, or has read nothing for a while."""
        first = self._kept[0][0] if self._kept else self._next
        replay.next = max(replay.next, first)
        try:
            for number, payload in islice(self._kept, replay.next - first, replay.next - first + BATCHES_A_TURN):
                if number >= replay.end:
                    break
                self._reply(replay.client, number.to_bytes(SEQUENCE_BYTES, "big"), payload)
                replay.next, replay.num_waits = number + 1, 0
            if replay.next < replay.end:
                return True
            self._reply(replay.client, END_OF_REPLAY, b"")
        except zmq.Again:
            replay.num_waits += 1
            return replay.num_waits * SLOW_S < GIVEN_UP_S
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
        return False

    def _reply(self, client: bytes, number: bytes, payload: bytes) -> None:
        assert self._router is not None
        self._router.send_multipart((client, b"", number, payload), zmq.NOBLOCK)

    def close(self) -> None:
        if self._router is not None:
            self._loop.remove_reader(self._router.FD)
            self._router.close(0)
        self._pub.close(0)
        self._context.term()


def local_sockets(run_dir: Path, index: int, incarnation: int) -> LocalSockets:
    """Those of a new scheduler; the files of earlier ones are removed, so that frontends turn to it."""
    for path in run_dir.glob(LocalSockets.pattern(index)):
        path.unlink(missing_ok=True)
    return LocalSockets.of(str(run_dir), index, incarnation)
