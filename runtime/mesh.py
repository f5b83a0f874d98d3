"""A process's place in the mesh: its sessions with its peers, and who those are.

Usable in any asyncio program: a process of the mesh (process.py), the supervisor, the Python API. Calls the App's on_*
methods in the event loop; never calls it from another thread.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog
import zmq
from msgspec import Struct

from meshlm.protocol import control_edge as control
from meshlm.protocol.channels import BY_DIRECTION, WhenFull, peers_of
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.digest import schema_digest
from meshlm.protocol.frames import FrameError, Kind, unpack
from meshlm.protocol.ids import Epoch, Identity, Incarnation, Role
from meshlm.protocol.session import Delivered, Hello, Opened, Refused, SendQueueFull, Session, SessionState
from meshlm.runtime.errors import LinkDown, LinkFull, ProcessFatal
from meshlm.runtime.link import Inbox, Outbox

TICK_S = 0.1
TICK_CONNECTING_S = 0.02  # while a session is not open yet
COORDINATOR = Identity(Role.COORDINATOR, 0)
SUPERVISOR = Identity(Role.SUPERVISOR, 0)

_encode = msgspec.msgpack.Encoder().encode
_log = structlog.get_logger()


class Listener(Protocol):
    """What a Mesh calls. Every App is one."""

    def on_message(self, peer: Identity, message: Struct) -> None: ...
    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None: ...
    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None: ...
    def flush(self) -> None: ...


class _Peer:
    """One link: its session, its outgoing socket, its decoder."""

    __slots__ = ("decode", "outbox", "session")

    def __init__(self, session: Session, outbox: Outbox, decode: Callable[[memoryview], Struct]) -> None:
        self.session, self.outbox, self.decode = session, outbox, decode


class Mesh:
    """See the module docstring. `config.run.run_dir` must exist with mode 0700."""

    def __init__(self, identity: Identity, incarnation: Incarnation, config: MeshConfig, listener: Listener) -> None:
        self.identity, self.incarnation, self.config = identity, incarnation, config
        self.log: Any = _log.bind(process=str(identity))
        self.ready = False
        self.on_fatal: asyncio.Future[None] | None = None  # set by process.py
        self._listener = listener
        self._run_dir = Path(config.run.run_dir)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: dict[Identity, _Peer] = {}
        self._epoch = (Incarnation(0), Epoch(0))
        self._hello = Hello(schema_digest(), self.address_of(identity))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: Inbox | None = None
        self._timer: asyncio.Handle | None = None
        self._closed = False

    def address_of(self, identity: Identity) -> str:
        """Where a process of this host listens."""
        return f"ipc://{self._run_dir}/{identity.role.value}-{identity.index}.sock"

    async def open(self) -> None:
        """Bind the inbox and begin to look for the supervisor and the coordinator."""
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox(self._context, self._hello.address, self._on_frame, self._after_batch)
        self._inbox.start(self._loop)
        for well_known in (SUPERVISOR, COORDINATOR):
            if (self.identity.role, well_known.role) in BY_DIRECTION and self.identity.role is not Role.SUPERVISOR:
                self._connect(well_known, self.address_of(well_known))
        self._tick()

    async def close(self) -> None:
        """Close all sockets. What was sent last gets a moment to leave."""
        for peer in self._peers.values():
            peer.outbox.flush(peer.session.wire)
        await asyncio.sleep(0.01)  # LINGER 0 would drop what ZeroMQ's thread has not written yet
        self._closed = True
        if self._timer:
            self._timer.cancel()
        if self._inbox:
            self._inbox.close()
        for peer in self._peers.values():
            peer.outbox.close()
        self._peers.clear()
        self._context.term()

    # --- for the App ---

    def send(self, peer: Identity, message: Struct) -> None:
        """Queue one message; never blocks. LinkDown, LinkFull (see channels.py)."""
        link = self._peers.get(peer)
        if link is None or not link.session.peer_incarnation or link.session.state is not SessionState.OPEN:
            raise LinkDown(peer)
        assert self._loop is not None
        try:
            link.session.send(_encode(message), self._loop.time())
        except SendQueueFull as full:
            if full.when_full is WhenFull.REFUSE:
                raise LinkFull(peer) from None
            self._drop(link, "it does not read its messages")
            raise LinkDown(peer) from None
        link.outbox.flush(link.session.wire)

    def peers(self, role: Role) -> list[Identity]:
        """Peers of this role with an open session, by index."""
        return sorted(i for i, p in self._peers.items() if i.role is role and p.session.state is SessionState.OPEN)

    def incarnation_of(self, peer: Identity) -> Incarnation:
        """Of the life that the open session is with; 0 without one."""
        link = self._peers.get(peer)
        return link.session.peer_incarnation if link and link.session.state is SessionState.OPEN else Incarnation(0)

    def tell_supervisor(self, message: Struct) -> None:
        """Say something to the supervisor; without one (tests, a lone process) it is dropped."""
        try:
            self.send(SUPERVISOR, message)
        except LinkDown:
            self.log.debug("no supervisor", message=type(message).__name__)

    def progress(self, phase: str, done: int = 0, total: int = 0, unit: str = "") -> None:
        """Start-up news for the user."""
        self.tell_supervisor(control.Progress(phase, done, total, unit))

    def fatal(self, message: str) -> None:
        """End this process; the user reads `message` last."""
        if self.on_fatal is not None and not self.on_fatal.done():
            self.on_fatal.set_exception(ProcessFatal(message))

    def set_ready(self) -> None:
        """This process does its job now: tell the coordinator, and through it all others."""
        self.ready = True
        self._join()

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: object) -> None:
        """Run in the loop from any thread, then flush the App."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._run_and_flush, callback, arguments)

    def call_later(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> asyncio.TimerHandle:
        """Run in the loop after `delay_s`, then flush the App."""
        assert self._loop is not None
        return self._loop.call_later(delay_s, self._run_and_flush, callback, arguments)

    def _run_and_flush(self, callback: Callable[..., None], arguments: tuple[object, ...]) -> None:
        callback(*arguments)
        self._listener.flush()

    # --- frames ---

    def _on_frame(self, frame: bytes) -> None:
        try:
            header, body = unpack(frame)
            if header.receiver != self.identity:
                raise FrameError(f"for {header.receiver}")
            link = self._peers.get(header.sender)
            if link is None:
                if header.kind is not Kind.HELLO:
                    raise FrameError(f"from {header.sender}, which never said hello")
                link = self._connect(header.sender, self.address_of(header.sender))
        except FrameError as error:
            self.log.warning("frame dropped", reason=str(error), size=len(frame))
            return
        assert self._loop is not None
        outcome = link.session.receive(header, body, self._loop.time())
        if link.session.wire:
            link.outbox.flush(link.session.wire)
        if type(outcome) is Delivered:
            self._deliver(header.sender, link, outcome.body)
        elif type(outcome) is Opened:
            self._on_opened(header.sender, link, outcome)
        elif type(outcome) is Refused:
            self.log.error("link refused", peer=str(header.sender), reason=outcome.reason)

    def _deliver(self, sender: Identity, link: _Peer, body: memoryview) -> None:
        try:
            message = link.decode(body)
        except msgspec.MsgspecError as error:
            self.log.error("message dropped", peer=str(sender), reason=str(error))
            return
        match message:
            case control.Members():
                self._on_members(message)
            case control.Died():
                self._on_died(message)
            case _:
                self._listener.on_message(sender, message)

    def _after_batch(self) -> None:
        self._listener.flush()

    def _on_opened(self, sender: Identity, link: _Peer, opened: Opened) -> None:
        if opened.replaced is not None:
            self._listener.on_peer_down(sender, opened.replaced, "replaced by a new process")
        if sender == COORDINATOR:
            self._join()
        self._listener.on_peer_up(sender, opened.incarnation)

    # --- membership ---

    def _join(self) -> None:
        if self.identity.role in (Role.COORDINATOR, Role.SUPERVISOR) or COORDINATOR not in self.peers(Role.COORDINATOR):
            return
        member = control.Member(self.identity, self.incarnation, self._hello.address, self.ready)
        self.send(COORDINATOR, control.Join(member))

    def _on_members(self, members: control.Members) -> None:
        epoch = (self.incarnation_of(COORDINATOR), members.epoch)
        if epoch <= self._epoch:
            return
        self._epoch = epoch
        for member in members.members:
            if member.identity not in self._peers and self._wants(member.identity):
                self._connect(member.identity, member.address)

    def _wants(self, other: Identity) -> bool:
        """Whether this process keeps a link with that one."""
        if other.role not in peers_of(self.identity.role):
            return False
        pair = {self.identity.role: self.identity.index, other.role: other.index}
        if pair.keys() == {Role.SCHEDULER, Role.WORKER}:
            return pair[Role.WORKER] // self.config.parallel.workers_per_rank == pair[Role.SCHEDULER]
        return True

    def _on_died(self, died: control.Died) -> None:
        link = self._peers.get(died.identity)
        if link is not None and link.session.close(died.incarnation):
            link.outbox.pending.clear()
            self._listener.on_peer_down(died.identity, died.incarnation, "the process died")

    def _drop(self, link: _Peer, reason: str) -> None:
        life = link.session.peer_incarnation
        if link.session.close(life):
            self.log.error("peer dropped", peer=str(link.session.peer), reason=reason)
            self._listener.on_peer_down(link.session.peer, life, reason)

    def _connect(self, peer: Identity, address: str) -> _Peer:
        """Start a link. FrameError when this process has no business with that role."""
        outgoing = BY_DIRECTION.get((self.identity.role, peer.role))
        incoming = BY_DIRECTION.get((peer.role, self.identity.role))
        if outgoing is None or incoming is None:
            raise FrameError(f"from {peer}, with which {self.identity} has no channel")
        session = Session(
            self.identity,
            self.incarnation,
            peer,
            self._hello,
            outgoing.window,
            outgoing.max_queued,
            outgoing.when_full,
        )
        decode = msgspec.msgpack.Decoder(incoming.messages).decode
        if self._timer is not None and not self._closed and self._loop is not None:
            self._timer.cancel()  # a new peer is greeted at once
            self._timer = self._loop.call_soon(self._tick)
        self._peers[peer] = link = _Peer(session, Outbox(self._context, address), decode)
        return link

    def _tick(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        delay = TICK_S
        for link in list(self._peers.values()):
            link.session.tick(now)
            if link.session.state is not SessionState.OPEN:
                delay = TICK_CONNECTING_S
                if link.outbox.pending:
                    link.session.wire.clear()  # one hello waiting is enough
            if link.session.wire or link.outbox.pending:
                link.outbox.flush(link.session.wire)
        if self._closed:
            return
        self._timer = self._loop.call_later(delay, self._tick)
