"""The simulated network: what ZeroMQ's PUSH/PULL with IMMEDIATE=1 gives, over ipc and over tcp, and no more.

Order within one connection; nothing between connections. A connection that breaks delivers some of what is in flight (late,
beside the next connection's frames) and loses the rest. A link between hosts that is cut for a moment delivers late, as TCP does;
one that is cut for longer loses its connections, which ZeroMQ's heartbeats notice, and gets no new ones before it is whole.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from meshlm.protocol.wire.ids import Role

if TYPE_CHECKING:
    from life import Loop, Process

RECONNECT_S = 0.02  # at most, until a PUSH socket has found a new inbox
NOTICE_S = 0.003  # at most, until it has noticed that the old one is gone
READ_AT_MOST = 128
AGAIN_S = 2.0  # at most, until a frame comes a second time where links carry everything twice


class Killed(BaseException):
    """The process whose event is being handled is dead from here on: nothing of the product may catch it."""


def running() -> "Process":
    """The process whose event is being handled."""
    return cast("Loop", asyncio.get_running_loop()).process


class Inbox:
    """In the place of runtime/mesh/link.py's. What arrives together is read together."""

    def __init__(
        self,
        context: object,
        address: str,
        on_frame: Callable[[bytes], None],
        on_drained: Callable[[], None],
        bind: Callable[["Inbox"], str] | None = None,
    ) -> None:
        self.process = process = running()
        self.address = bind(self) if bind is not None else address
        self.bound_at = process.world.now
        self.closed_at: float | None = None
        self._frames: deque[bytes] = deque()
        self._on_frame, self._on_drained = on_frame, on_drained
        process.world.inboxes[self.address] = self
        process.inboxes.append(self)

    def start(self, loop: object) -> None:
        """Nothing came yet."""

    def take(self, frames: tuple[bytes, ...]) -> None:
        if self.closed_at is not None:
            return
        if not self._frames:
            world = self.process.world
            delay = self.process.dice.random() ** 4 * 1e-3
            world.at(world.now + delay, self.process, self._read)
        self._frames.extend(frames)

    def _read(self) -> None:
        for _ in range(min(len(self._frames), READ_AT_MOST)):
            self._on_frame(self._frames.popleft())
        if self._frames:
            self.process.loop.call_soon(self._read)
        self._on_drained()


class Connection:
    """One life of a PUSH socket's pipe. Batches from number `cut` on are lost."""

    __slots__ = ("cut", "flying", "inbox", "last_at", "num_arrived", "route", "up_at")

    def __init__(self, inbox: Inbox, up_at: float, host: int) -> None:
        self.inbox, self.up_at = inbox, up_at
        self.route = (host, inbox.process.host)
        self.flying: deque[tuple[bytes, ...]] = deque()
        self.num_arrived = 0
        self.cut, self.last_at = 1 << 60, 0.0

    def arrive(self) -> None:
        """The next batch, unless the link is cut now."""
        world = self.inbox.process.world
        if world.cuts and (end := world.cuts.get(self.route, 0.0)) > world.now:
            world.at(end, None, self.arrive)
            return
        frames = self.flying.popleft()
        number, self.num_arrived = self.num_arrived, self.num_arrived + 1
        world.arrived(len(frames))
        if number < self.cut:
            self.inbox.take(frames)


class Outbox:
    """In the place of runtime/mesh/link.py's."""

    def __init__(self, context: object, address: str, prepare: object = None) -> None:
        self._process = process = running()
        self.address, self.world = address, process.world
        self.pending: deque[bytes] = deque()
        self.slow_until = self.slow_s = self.twice_until = 0.0
        self._breaks_after: tuple[int, float] | None = None  # so many sends, for so many seconds
        self._dice = random.Random(process.dice.getrandbits(32))
        self._connection: Connection | None = None
        self._free_at = self.world.now
        process.outboxes.append(self)

    def flush(self, frames: deque[bytes]) -> None:
        if self.pending or not frames:
            self.pending.extend(frames)
            frames.clear()
            frames = self.pending
        if not frames:
            return
        connection = self._connected()
        if connection is not None:
            self._send(connection, tuple(frames))
        elif frames is not self.pending:
            self.pending.extend(frames)
        else:
            return
        frames.clear()

    def push(self, frame: bytes) -> None:
        if (connection := self._connected()) is not None:
            self._send(connection, (frame,))

    def _connected(self) -> Connection | None:
        """The connection, where there is one now (a send on a broken one that looks whole loses the frames)."""
        now, known = self.world.now, self._connection
        if known is not None and (closed_at := known.inbox.closed_at) is not None:
            if now < closed_at + self._dice.random() * NOTICE_S:
                return known
            known = self._connection = None
        if known is None:
            inbox = self.world.inboxes.get(self.address)
            if inbox is None:
                return None
            begun = max(self._free_at, inbox.bound_at)
            known = Connection(inbox, begun + self._dice.random() ** 2 * RECONNECT_S, self._process.host)
            self._connection = known
        if self.world.cuts and not known.last_at and known.up_at > now - RECONNECT_S:
            whole_at = self.world.whole_at(known.route)
            if whole_at > known.up_at:
                known.up_at = whole_at + self._dice.random() ** 2 * RECONNECT_S
        return known if now >= known.up_at else None

    def _send(self, connection: Connection, frames: tuple[bytes, ...]) -> None:
        world = self.world
        delay = world.speed_s * (0.1 + self._dice.random() ** 4 * 10)
        if world.now < self.slow_until:
            delay += self.slow_s
        connection.last_at = max(connection.last_at, world.now + delay)
        connection.flying.append(frames)
        world.at(connection.last_at, None, connection.arrive)
        if world.now < self.twice_until:
            again_at = connection.last_at + self._dice.random() ** 3 * AGAIN_S
            world.at(again_at, None, connection.inbox.take, frames)
        if self._breaks_after is not None:
            num_sends, for_s = self._breaks_after
            self._breaks_after = (num_sends - 1, for_s) if num_sends > 1 else None
            if num_sends <= 1:
                self.break_off(for_s)
        if self._process.sends_left:
            self._count(connection)

    def _count(self, connection: Connection) -> None:
        """Its process dies after one of its next sends to a worker, in the middle of what it does."""
        process = self._process
        if connection.inbox.process.identity.role is Role.WORKER:
            process.sends_left -= 1
            if not process.sends_left:
                self.world.kill(process.identity, process.dice.random() ** 4 * 2.0)
                raise Killed

    def break_soon(self, for_s: float) -> None:
        """The connection is lost when something is in flight."""
        self._breaks_after = (self._dice.choice((1, 1, 2, 4)), for_s)

    def break_off(self, for_s: float) -> None:
        """The connection is lost, with some of what is in flight."""
        if self._connection is not None:
            flying = len(self._connection.flying)
            self._connection.cut = self._connection.num_arrived + self._dice.randint(0, flying)
            self._connection = None
        self._breaks_after = None
        self._free_at = self.world.now + for_s

    def cut_for(self, routes: tuple[tuple[int, int], ...], for_s: float, notice_s: float) -> None:
        """The link between the hosts is cut, in the directions of `routes`. Heartbeats see it after `notice_s` or somewhat more."""
        connection, now = self._connection, self.world.now
        if connection is None or len({*connection.route}) == 1:
            return
        if connection.route in routes:
            connection.last_at = max(connection.last_at, now + for_s)
        noticed_s = notice_s * (1 + self._dice.random() / 3)
        if noticed_s < for_s:
            self.world.at(now + noticed_s, None, self._lose, connection, routes, now + for_s)

    def _lose(self, connection: Connection, routes: tuple[tuple[int, int], ...], until: float) -> None:
        if connection is not self._connection:
            return
        self.break_off(until - self.world.now)
        if connection.route in routes:
            connection.cut = connection.num_arrived

    def close(self) -> None:
        """A peer has another address now."""
        self.break_off(0.0)
