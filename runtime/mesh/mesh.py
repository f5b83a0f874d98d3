"""A process's place in the mesh: its sessions with its peers, and who those are.

Usable in any asyncio program: a process of the mesh (process.py), the supervisor, the Python API. Calls the App's on_*
methods in the event loop; never calls it from another thread.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
from msgspec import Struct

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges import control
from meshlm.protocol.wire import frames
from meshlm.protocol.wire import session as wire
from meshlm.protocol.wire.channels import MAX_MESSAGE_BYTES, WhenFull
from meshlm.protocol.wire.ids import COORDINATOR, Epoch, Identity, Incarnation, Role
from meshlm.runtime.errors import LinkDown, LinkFull, MessageTooLong, ProcessFatal
from meshlm.runtime.mesh import descriptors
from meshlm.runtime.mesh.link import Inbox
from meshlm.runtime.mesh.links import Links, Listener, Peer, what_is
from meshlm.runtime.mesh.remote import Remote
from meshlm.runtime.process.logs import Limited
from meshlm.runtime.process.timeline import Timeline

TICK_S = 0.2  # acks leave well before the peer's replay
TICK_REMOTE_S = 0.1  # links between nodes also count for how long a peer is silent
TICK_CONNECTING_S = 0.02  # while a session is not open yet

_encode = msgspec.msgpack.Encoder().encode
_log = structlog.get_logger()


class Mesh:
    """The links of one process to all others. `config.run.run_dir` must exist with mode 0700."""

    def __init__(self, identity: Identity, incarnation: Incarnation, config: MeshConfig, listener: Listener) -> None:
        self.identity, self.incarnation, self.config = identity, incarnation, config
        self.log: Any = _log.bind(process=str(identity))
        self.ready = False
        self.timeline = Timeline(identity)
        self.on_fatal: asyncio.Future[None] | None = None  # set by process.py
        self.say_beat: Callable[[], None] = lambda: None  # a phase that is not to wait for the timer; set by process.py
        self.on_refused: Callable[[Identity, str], None] | None = None  # set by the supervisor
        self.supervisor = Identity(Role.SUPERVISOR, config.node.index if config.node else 0)
        self._listener = listener
        self._context = descriptors.context(identity, config)
        self._by_frame_prefix: dict[bytes, Peer] = {}  # by how the frames of their sessions begin
        self._epoch = (Incarnation(0), Epoch(0))
        self._remote = Remote.of(identity, config)
        self._limited = Limited(self.log)
        self._links = Links(identity, incarnation, config, self._context, self._remote, self._limited)
        self._peers = self._links.peers
        self.blocked = ""  # which link does not move, though the peer answers
        self._told_blocked = ""  # to the coordinator
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: Inbox | None = None
        self._timer: asyncio.Handle | None = None
        self._closed = False

    async def open(self) -> None:
        """Bind the inbox and begin to look for the supervisor and the coordinator."""
        self._loop = asyncio.get_running_loop()
        descriptors.claim(self.identity, self.config)
        if self._remote is not None:
            self._remote.open(self._context, self._on_remote_frame, self._listener.flush, self.log)
        self._links.set_hello()
        self._inbox = Inbox(self._context, self._links.hello.address, self._on_frame, self._listener.flush)
        self._inbox.start(self._loop)
        for peer, address in self._links.well_known().items():
            self._links.connect(peer, address)
        self._tick()

    async def close(self) -> None:
        """Close all sockets. What was sent last gets a moment to leave."""
        for session in self._remote.sessions.values() if self._remote else ():
            session.bye()
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
        if self._remote:
            self._remote.close()
        self._peers.clear()
        self._context.term()

    # --- for the App ---

    def send(self, peer: Identity, message: Struct) -> None:
        """Queue one message; never blocks. LinkDown, LinkFull (see channels.py), MessageTooLong: ends what the message is about."""
        link = self._peers.get(peer)
        if link is None or not link.session.peer_incarnation or link.session.state is not wire.SessionState.OPEN:
            raise LinkDown(peer)
        assert self._loop is not None
        body = _encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            name = type(message).__name__
            self._limited.error("message too long", peer=str(peer), message=name, size=len(body))
            raise MessageTooLong(peer, name, len(body), MAX_MESSAGE_BYTES)
        try:
            link.session.send(body, self._loop.time())
        except wire.SendQueueFull as full:
            if full.when_full is WhenFull.REFUSE:
                raise LinkFull(peer) from None
            self._drop(link, "it does not read its messages")
            raise LinkDown(peer) from None
        link.outbox.flush(link.session.wire)

    def drop(self, peer: Identity, reason: str) -> None:
        """End the session with this peer, as if it had died; a new one opens at once."""
        if (link := self._peers.get(peer)) is not None:
            self._drop(link, reason)

    def lost(self, peer: Identity) -> None:
        """The process of this peer has died, which nobody else can tell."""
        self._on_died(control.Died(peer, self.incarnation_of(peer)))

    def peers(self, role: Role) -> list[Identity]:
        """Peers of this role with an open session, by index."""
        return sorted(i for i, p in self._peers.items() if i.role is role and p.session.state is wire.SessionState.OPEN)

    def incarnation_of(self, peer: Identity) -> Incarnation:
        """The incarnation that the open session is with; 0 without one."""
        link = self._peers.get(peer)
        return (
            link.session.peer_incarnation if link and link.session.state is wire.SessionState.OPEN else Incarnation(0)
        )

    def in_hand_of(self, peer: Identity, incarnation: Incarnation) -> tuple[str, ...]:
        """The requests that this incarnation died with in hand, if the supervisor said so."""
        return self._links.in_hand.get((peer, incarnation), ())

    def sent(self) -> dict[str, int]:
        """The messages of each open link's present session, by the peer's name."""
        links = self._peers.items()
        return {str(peer): one.session.num_sent for peer, one in links if one.session.state is wire.SessionState.OPEN}

    def tell_supervisor(self, message: Struct) -> None:
        """Say something to the supervisor; without one (tests, a lone process) it is dropped."""
        try:
            self.send(self.supervisor, message)
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
        link = self._by_frame_prefix.get(frame_prefix := frame[: frames.FRAME_PREFIX_BYTES])
        if link is None or link.session.frame_prefix != frame_prefix or len(frame) < frames.HEADER_BYTES:
            self._on_any_frame(frame)
            return
        assert self._loop is not None
        session = link.session
        is_next = session.is_next(self._loop.time(), *frames.unpack_numbers(frame, frames.FRAME_PREFIX_BYTES))
        if session.wire:
            link.outbox.flush(session.wire)
        if is_next:
            self._deliver(session.peer, link, memoryview(frame)[frames.HEADER_BYTES :])

    def _on_any_frame(self, frame: bytes) -> None:
        try:
            header, body = frames.unpack(frame)
            if header.receiver != self.identity:
                raise frames.FrameError(f"for {header.receiver}")
            link = self._peers.get(header.sender)
            if link is None:
                if header.kind is not frames.Kind.HELLO:
                    raise frames.FrameError(f"from {header.sender}, which never said hello")
                link = self._let_in(header.sender, self._links.address_of(header.sender))
        except frames.FrameError as error:
            self._limited.warning("frame dropped", reason=str(error), size=len(frame))
            return
        assert self._loop is not None
        outcome = link.session.receive(header, body, self._loop.time())
        if type(outcome) is wire.Opened:
            self._links.retarget(link, outcome.hello.tcp)  # before the welcome leaves
        if link.session.wire:
            link.outbox.flush(link.session.wire)
        if outcome is not None:
            self._on_news(header.sender, link, outcome)

    def _on_remote_frame(self, frame: bytes) -> None:
        """A frame of another node. Only a hello can be a stranger's, and nobody there can be of this node."""
        assert self._remote is not None
        session = self._remote.sessions.get(frames.sender_of(frame))
        if session is not None:
            session.heard()
        else:
            try:
                self._let_in(*self._links.stranger(frame))
            except frames.FrameError as error:
                self._limited.warning("frame dropped", reason=str(error), size=len(frame), remote=True)
                return
        self._on_frame(frame)

    def _on_news(self, sender: Identity, link: Peer, outcome: wire.Outcome) -> None:
        match outcome:
            case wire.Delivered():
                self._deliver(sender, link, outcome.body)
            case wire.Opened():
                self._on_opened(sender, link, outcome)
            case wire.Ended():
                link.outbox.pending.clear()
                self._listener.on_peer_down(sender, outcome.incarnation, "it ended")
            case wire.Refused():
                self._limited.error("link refused", peer=str(sender), reason=outcome.reason)
                if self.on_refused is not None and link.session.state is wire.SessionState.REFUSED:
                    self.on_refused(sender, outcome.reason)
            case wire.Rival():
                self._limited.error("rival refused", peer=str(sender), at=outcome.hello.tcp or outcome.hello.address)
                if self._remote is not None and outcome.hello.tcp and self._loop is not None:
                    self._remote.refuse(outcome, self._loop.time())

    def _deliver(self, sender: Identity, link: Peer, body: memoryview) -> None:
        try:
            message = link.decode(body)
        except wire.BAD_BODY as error:
            self._limited.error("message dropped", peer=str(sender), reason=str(error))
            return
        if link.expires_at and self.identity.role in (Role.COORDINATOR, Role.SUPERVISOR):
            link.expires_at = 0.0  # they name others, and nobody names any to them
        if type(message) is control.Members:
            self._on_members(message)
            return
        if type(message) is control.Died:
            self._on_died(message)
            if self.identity.role not in (Role.SUPERVISOR, message.identity.role):
                return  # other nodes' supervisors tell each other; a frontend hears what frontends before it died of
        self._listener.on_message(sender, message)

    def _on_opened(self, sender: Identity, link: Peer, opened: wire.Opened) -> None:
        peers = self._peers.values()
        self._by_frame_prefix = {one.session.frame_prefix: one for one in peers if one.session.frame_prefix}
        if opened.replaced is not None:
            self._listener.on_peer_down(sender, opened.replaced, "replaced by a new process")
        if sender == COORDINATOR:
            self._join()
            self._told_blocked = ""
        self._listener.on_peer_up(sender, opened.incarnation)

    # --- membership ---

    def _join(self) -> None:
        if self.identity.role in (Role.COORDINATOR, Role.SUPERVISOR) or COORDINATOR not in self.peers(Role.COORDINATOR):
            return
        self.send(COORDINATOR, control.Join(self._links.as_member(ready=self.ready)))

    def _on_members(self, members: control.Members) -> None:
        if (epoch := (self.incarnation_of(COORDINATOR), members.epoch)) <= self._epoch:
            return
        self._epoch = epoch
        if self._links.meet(members.members, self.config):
            self._greet()

    def _on_died(self, died: control.Died) -> None:
        self._links.note_death(died)
        if (link := self._peers.get(died.identity)) is None:
            return
        incarnation = link.session.peer_incarnation  # maybe an earlier one, of whose death nobody told
        if link.session.close(died.incarnation):
            link.outbox.pending.clear()
            self._listener.on_peer_down(died.identity, incarnation, "the process died")

    def _drop(self, link: Peer, reason: str) -> None:
        """Drops the session: all messages between us are lost, whether or not the peer lives; if it does, a new session opens."""
        incarnation = link.session.peer_incarnation
        if link.session.lose():
            link.outbox.pending.clear()
            if self._remote is not None:  # by its name again: it may come back at another address
                self._links.retarget(link, self._remote.well_known().get(link.session.peer, ""))
            self.log.error("peer dropped", peer=str(link.session.peer), reason=reason)
            self._listener.on_peer_down(link.session.peer, incarnation, reason)

    def _let_in(self, peer: Identity, address: str) -> Peer:
        """Start a link that the peer asked for. FrameError when it may not."""
        assert self._loop is not None
        link = self._links.let_in(peer, address, self._loop.time())
        self._greet()
        return link

    def _greet(self) -> None:
        """A new peer is greeted at once."""
        if self._timer is not None and not self._closed and self._loop is not None:
            self._timer.cancel()
            self._timer = self._loop.call_soon(self._tick)

    def _expire(self, link: Peer) -> bool:
        """A newcomer's time is over. Where nobody named it, it goes again; if it lives, it comes again. False: it stays."""
        link.expires_at = 0.0
        session = link.session
        if session.peer not in self._links.newcomers.here:
            return False
        self._by_frame_prefix.pop(session.frame_prefix, None)
        self._links.forget(link)
        if session.state is wire.SessionState.OPEN:
            self._listener.on_peer_down(session.peer, session.peer_incarnation, "nobody knows it")
        return True

    def _mend(self, link: Peer) -> None:
        """Give up a session with a peer that is silent or stuck; note one that is about to be."""
        session = link.session
        if session.silent:
            self._drop(link, f"silent for {session.silence_s:g} s (--peer-timeout)")
            self._listener.flush()
        elif session.stuck:
            self._limited.error("frame never taken", peer=str(session.peer), **what_is(session.held_up))
            self._drop(link, "it does not take a message, however often that is sent")
            self._listener.flush()
        elif session.blocked:
            self.blocked = f"{session.peer} does not take what {self.identity} sends it"
        elif session.starved:
            self.blocked = f"what {session.peer} sends does not come to {self.identity}"

    def _tell_blocked(self) -> None:
        """Every frontend's /ready is to know, by way of the coordinator."""
        if self.identity == COORDINATOR:
            self._listener.on_message(COORDINATOR, control.Blocked(self.blocked))
        else:
            try:
                self.send(COORDINATOR, control.Blocked(self.blocked))
            except (LinkDown, LinkFull):
                return  # at the next tick
        self._told_blocked = self.blocked

    def _tick(self) -> None:
        assert self._loop is not None
        # First: without ticks nothing is acknowledged any more.
        self._timer = self._loop.call_later(TICK_S if self._remote is None else TICK_REMOTE_S, self._tick)
        now, impatient, self.blocked = self._loop.time(), False, ""
        for link in list(self._peers.values()):
            session = link.session
            if link.expires_at and now >= link.expires_at and self._expire(link):
                continue
            session.tick(now)
            if session.state is not wire.SessionState.OPEN:
                impatient |= session.impatient
            elif session.is_troubled:
                self._mend(link)
            if link.outbox.pending:
                session.wire.clear()  # the same is waiting already, and one hello is enough
            if session.wire or link.outbox.pending:
                link.outbox.flush(session.wire)
        if self.blocked != self._told_blocked:
            self._tell_blocked()
        if self._remote is not None:
            self._remote.tick(now)
        if impatient:
            self._timer.cancel()
            self._timer = self._loop.call_later(TICK_CONNECTING_S, self._tick)
