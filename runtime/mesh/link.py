"""Frames over ZeroMQ: one bound inbox per process, one outgoing socket per peer.

Used by mesh.py only. Knows nothing of sessions or messages. MESH.md's measurements behind the choices: PUSH/PULL read through
add_reader (zmq.asyncio costs ten times more), single frames, bounded reads, one socket per direction.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq
from zmq.backend import Socket as RawSocket

from meshlm.protocol.wire.channels import MAX_FRAME_BYTES

READ_AT_MOST = 128  # frames per turn of the loop, so that timers are not starved ...
READ_FOR_S = 0.02  # ... and none is begun after so long: one that takes long is not to have others behind it
RECONNECT_MS = 2
POLLIN = int(zmq.POLLIN)  # `&` with the flag itself takes as long as the system call before it

Socket = zmq.Socket[bytes]


class Inbox:
    """The process's one bound PULL socket."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        on_frame: Callable[[bytes], None],
        on_drained: Callable[[], None],
        bind: Callable[[Socket], str] | None = None,
    ) -> None:
        """Bind to `address`, or let `bind` do it and say where. zmq.ZMQError when that is taken. `start` starts reading."""
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)  # flow control is the sessions'
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.address = address
        try:
            if bind is None:
                self._socket.bind(address)
            else:
                self.address = bind(self._socket)
        except zmq.ZMQError:
            self._socket.close(0)  # the context's end would wait for it
            raise
        self._on_frame, self._on_drained = on_frame, on_drained
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read whenever something is there, from the next turn but one: a process opens its mesh and then begins its App's start(),
        and what peers said already must not come before that."""
        self._loop = loop
        loop.call_soon(self._begin)

    def _begin(self) -> None:
        if self._loop is not None:
            self._loop.add_reader(self._socket.FD, self._read)
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Read until empty or READ_AT_MOST. The FD is edge-triggered: stopping early needs another turn."""
        receive, on_frame = self._socket.recv, self._on_frame
        state: Any = self._socket.getsockopt  # of EVENTS: an int, whatever pyzmq's types say
        if self._loop is None:
            return
        until = self._loop.time() + READ_FOR_S
        for _ in range(READ_AT_MOST):
            try:
                frame = receive(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                on_frame(frame)
            except BaseException:
                self._loop.call_soon(self._read)  # the frames behind it would wait for the next one to come
                raise
            if self._loop is None:
                return  # closed by what the frame said
            if not state(zmq.EVENTS) & POLLIN:  # a fraction of the cost of another recv's exception
                break
            if self._loop.time() > until:
                self._loop.call_soon(self._read)
                break
        else:
            self._loop.call_soon(self._read)
        self._on_drained()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.FD)
            self._loop = None
        self._socket.close(0)


class Outbox:
    """Frames to one peer, in order. What the socket does not take waits in `pending` for the next `flush`."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, prepare: Callable[[Socket], None] | None = None
    ) -> None:
        """Connect, after `prepare` has set what else the socket needs. zmq.ZMQError for what is no address."""
        self.address = address
        self.pending: deque[bytes] = deque()
        self._socket = context.socket(zmq.PUSH)
        # without the Python around it, which is for what we do not use
        self._send = partial(RawSocket.send, self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 10 * RECONNECT_MS)
        if prepare is not None:
            prepare(self._socket)
        try:
            self._socket.connect(address)
        except zmq.ZMQError:
            self._socket.close(0)
            raise

    def flush(self, frames: deque[bytes]) -> None:
        """Put `frames` on the wire after what is pending; takes them out of the deque."""
        pending = self.pending
        if pending or not frames:
            pending.extend(frames)
            frames.clear()
            frames = pending
        send = self._send
        try:
            while frames:
                send(frames[0], zmq.NOBLOCK)
                frames.popleft()
        except zmq.Again:
            if frames is not pending:
                pending.extend(frames)
                frames.clear()

    def push(self, frame: bytes) -> None:
        """Send it when the peer is there; else it is dropped."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(0)
