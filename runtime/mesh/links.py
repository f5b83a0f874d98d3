"""The links of a Mesh: how they begin, where they lead, which of them go again; and what a Mesh tells its App. Used by mesh.py."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
from msgspec import Struct

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges import control
from meshlm.protocol.wire.channels import BY_DIRECTION, are_linked
from meshlm.protocol.wire.digest import schema_digest
from meshlm.protocol.wire.frames import FrameError, Kind, unpack
from meshlm.protocol.wire.ids import COORDINATOR, Identity, Incarnation, Role
from meshlm.protocol.wire.session import BAD_BODY, Hello, Session
from meshlm.runtime.mesh.link import Outbox
from meshlm.runtime.mesh.newcomers import EXPIRES_S, Newcomers
from meshlm.runtime.mesh.remote import Remote
from meshlm.runtime.process.logs import Limited


class Listener(Protocol):
    """The callbacks of a Mesh. Every App is one."""

    def on_message(self, peer: Identity, message: Struct) -> None: ...
    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None: ...
    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None: ...
    def flush(self) -> None: ...


class Peer:
    """A peer, with its session, its outgoing socket and its decoder."""

    __slots__ = ("decode", "expires_at", "outbox", "session")

    def __init__(self, session: Session, outbox: Outbox, decode: Callable[[memoryview], Struct]) -> None:
        self.session, self.outbox, self.decode = session, outbox, decode
        self.expires_at = 0.0  # of a newcomer that nobody has named yet; 0: it stays


class _Tag(Struct):
    type: str = ""


_decode_tag = msgspec.msgpack.Decoder(_Tag).decode


def what_is(body: memoryview) -> dict[str, object]:
    """A message for the log: its tag and its size."""
    try:
        tag = _decode_tag(body).type
    except BAD_BODY:
        tag = ""
    return {"message": tag, "size": len(body)}


class Links:
    """`peers` by name. `hello` is what sessions begin with; set once the process knows where it listens."""

    def __init__(
        self,
        me: Identity,
        incarnation: Incarnation,
        config: MeshConfig,
        context: "zmq.Context[zmq.Socket[bytes]]",
        remote: Remote | None,
        log: Limited,
    ) -> None:
        self._me, self._incarnation, self._context, self._remote, self._log = me, incarnation, context, remote, log
        self._node, self._run_dir = config.node, Path(config.run.run_dir)
        self.peers: dict[Identity, Peer] = {}
        self.newcomers = Newcomers(me, config)
        self.hello = Hello("", "")
        # the requests of processes that died with some
        self.in_hand: dict[tuple[Identity, Incarnation], tuple[str, ...]] = {}

    def note_death(self, died: control.Died) -> None:
        """Keeps what it had in hand, as long as it is the last of its place that died."""
        self.in_hand = {dead: names for dead, names in self.in_hand.items() if dead[0] != died.identity}
        if died.in_hand:
            self.in_hand[died.identity, died.incarnation] = died.in_hand

    def address_of(self, identity: Identity) -> str:
        """The address where a process of this host listens."""
        return f"ipc://{self._run_dir}/{identity.role.value}-{identity.index}.sock"

    def set_hello(self) -> None:
        """Once the remote side is bound: its port is known then."""
        tcp = self._remote.address if self._remote else ""
        node = self._node.id if self._node else ""
        self.hello = Hello(schema_digest(), self.address_of(self._me), tcp, node, self._incarnation)

    def well_known(self) -> dict[Identity, str]:
        """Whom this process looks for, and where, before it knows anybody."""
        elsewhere = self._remote.well_known() if self._remote else {}
        if self._me.role is Role.SUPERVISOR:
            return elsewhere
        supervisor = Identity(Role.SUPERVISOR, self._node.index if self._node else 0)
        wanted = (supervisor, COORDINATOR) if self._me.role is not Role.COORDINATOR else (supervisor,)
        return {peer: self.address_of(peer) for peer in wanted} | elsewhere

    def connect(self, peer: Identity, address: str) -> Peer:
        """Start a link. FrameError when this process has no business with that role."""
        outgoing = BY_DIRECTION.get((self._me.role, peer.role))
        incoming = BY_DIRECTION.get((peer.role, self._me.role))
        if outgoing is None or incoming is None:
            raise FrameError(f"from {peer}, with which {self._me} has no channel")
        remote = self._remote if address.startswith("tcp:") else None
        try:
            outbox = remote.outbox(address) if remote else Outbox(self._context, address)
        except zmq.ZMQError as error:
            raise FrameError(f"no link to {peer}: {error.strerror}") from None
        session = Session(
            self._me,
            self._incarnation,
            peer,
            self.hello,
            outgoing.window,
            outgoing.max_queued,
            outgoing.when_full,
            remote.silence_s if remote else 0.0,
            outgoing.max_bytes,
        )
        if remote:
            remote.add(session)
        self.peers[peer] = link = Peer(session, outbox, msgspec.msgpack.Decoder(incoming.messages).decode)
        return link

    def let_in(self, peer: Identity, address: str, now: float) -> Peer:
        """Start a link that the peer asked for. FrameError when it may not."""
        stays = self.newcomers.may_stay(peer)
        link = self.connect(peer, address)
        if not stays:
            self.newcomers.here.add(peer)
            link.expires_at = now + EXPIRES_S
        return link

    def stranger(self, frame: bytes) -> tuple[Identity, str]:
        """Who says hello from another node, and the address for the answer. FrameError when nobody there may say this."""
        header, body = unpack(frame)
        if header.kind is not Kind.HELLO or header.receiver != self._me or header.sender in self.peers:
            raise FrameError(f"from {header.sender} for {header.receiver}, which never said hello there")
        assert self._remote is not None
        return header.sender, self._remote.stranger(header.sender, body)

    def forget(self, link: Peer) -> None:
        """Forgets a peer as if it had never been."""
        peer = link.session.peer
        self.newcomers.here.discard(peer)
        del self.peers[peer]
        if self._remote is not None:
            self._remote.forget(peer)
        link.outbox.close()

    def address_of_member(self, member: control.Member) -> str:
        """The address at which this process reaches the member."""
        return member.address if self._remote is None else self._remote.route(member.node, member.address, member.tcp)

    def as_member(self, *, ready: bool) -> control.Member:
        """This process, as the coordinator names it to others."""
        hello = self.hello
        return control.Member(self._me, self._incarnation, hello.address, ready, hello.tcp, hello.node)

    def meet(self, members: Sequence[control.Member], config: MeshConfig) -> bool:
        """Connect to those that the coordinator names and that are to be linked with this process. Whether there are new ones."""
        self.newcomers.name(frozenset(member.identity for member in members))
        workers_per_rank, shares_pages = config.parallel.workers_per_rank, config.kv_transfer.shares_pages
        has_new = False
        for member in members:
            link = self.peers.get(member.identity)
            if link is not None:
                if member.incarnation > link.session.peer_incarnation:
                    self.retarget(link, member.tcp)
            elif are_linked(self._me, member.identity, workers_per_rank, shares_pages):
                try:
                    self.connect(member.identity, self.address_of_member(member))
                    has_new = True
                except FrameError as error:
                    self._log.error("no link", peer=str(member.identity), reason=str(error))
        return has_new

    def retarget(self, link: Peer, address: str) -> None:
        """A new incarnation of a process of another node has another port."""
        if self._remote is None or not link.outbox.address.startswith("tcp:") or address in ("", link.outbox.address):
            return
        try:
            outbox = self._remote.outbox(address)
        except FrameError as error:
            self._log.warning("address ignored", peer=str(link.session.peer), reason=str(error))
            return
        link.outbox.close()
        link.outbox = outbox
