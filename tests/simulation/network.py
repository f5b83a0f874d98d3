"""The simulated network: what ZeroMQ's ipc PUSH/PULL with IMMEDIATE=1 gives, and no more.

Order within one connection; nothing between connections. A connection that breaks delivers some of what is in flight (late,
beside the next connection's frames) and loses the rest.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from world import Loop, Process

RECONNECT_S = 0.02  # at most, until a PUSH socket has found a new inbox
NOTICE_S = 0.003  # at most, until it has noticed that the old one is gone
READ_AT_MOST = 128


def running() -> "Process":
    """The process whose event is being handled."""
    return cast("Loop", asyncio.get_running_loop()).process


class Inbox:
    """In the place of runtime/link.py's. What arrives together is read together."""

    def __init__(
        self, context: object, address: str, on_frame: Callable[[bytes], None], on_drained: Callable[[], None]
    ) -> None:
        self.process = process = running()
        self.bound_at = process.world.now
        self.closed_at: float | None = None
        self._frames: deque[bytes] = deque()
        self._on_frame, self._on_drained = on_frame, on_drained
        process.inbox = process.world.inboxes[address] = self

    def start(self, loop: object) -> None:
        """Nothing came yet."""

    def arrive(self, connection: "Connection", number: int, frames: tuple[bytes, ...]) -> None:
        world = self.process.world
        world.arrived(len(frames))
        if number >= connection.cut or self.closed_at is not None:
            return
        connection.num_arrived = number + 1
        if not self._frames:
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

    __slots__ = ("cut", "inbox", "last_at", "num_arrived", "num_sent", "up_at")

    def __init__(self, inbox: Inbox, up_at: float) -> None:
        self.inbox, self.up_at = inbox, up_at
        self.num_sent = self.num_arrived = 0
        self.cut, self.last_at = 1 << 60, 0.0


class Outbox:
    """In the place of runtime/link.py's."""

    def __init__(self, context: object, address: str) -> None:
        process = running()
        self.address, self.world = address, process.world
        self.pending: deque[bytes] = deque()
        self.slow_until = self.slow_s = 0.0
        self._breaks_after: tuple[int, float] | None = None  # so many sends, for so many seconds
        self._dice = random.Random(process.dice.getrandbits(32))
        self._connection: Connection | None = None
        self._free_at = self.world.now
        process.outboxes[address] = self

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
            known = self._connection = Connection(inbox, begun + self._dice.random() ** 2 * RECONNECT_S)
        return known if now >= known.up_at else None

    def _send(self, connection: Connection, frames: tuple[bytes, ...]) -> None:
        delay = self.world.speed_s * (0.1 + self._dice.random() ** 4 * 10)
        if self.world.now < self.slow_until:
            delay += self.slow_s
        connection.last_at = max(connection.last_at, self.world.now + delay)
        self.world.at(connection.last_at, None, connection.inbox.arrive, connection, connection.num_sent, frames)
        connection.num_sent += 1
        if self._breaks_after is not None:
            num_sends, for_s = self._breaks_after
            self._breaks_after = (num_sends - 1, for_s) if num_sends > 1 else None
            if num_sends <= 1:
                self.break_off(for_s)

    def break_soon(self, for_s: float) -> None:
        """The connection is lost when something is in flight."""
        self._breaks_after = (self._dice.choice((1, 1, 2, 4)), for_s)

    def break_off(self, for_s: float) -> None:
        """The connection is lost, with some of what is in flight."""
        if self._connection is not None:
            flying = self._connection.num_sent - self._connection.num_arrived
            self._connection.cut = self._connection.num_arrived + self._dice.randint(0, flying)
            self._connection = None
        self._breaks_after = None
        self._free_at = self.world.now + for_s

    def close(self) -> None:
        """Processes here are killed, never closed."""
