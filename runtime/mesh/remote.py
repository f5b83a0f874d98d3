"""A process's side of a mesh of several nodes: its tcp inbox, and which peers are of other nodes.

Owned by mesh.py; there is none in a mesh of one node, and none in a frontend, which has no peer elsewhere. Knows nothing of messages.

Every holder of the mesh's key may connect; what it may then say is limited here: nobody elsewhere can speak as a process of this
node, and channels.py gives each role its messages.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from meshlm.protocol.config import MeshConfig, Node
from meshlm.protocol.wire.frames import FrameError, sender_key
from meshlm.protocol.wire.ids import COORDINATOR, HEAD, Identity, Role
from meshlm.protocol.wire.session import BAD_BODY, Hello, Rival, Session
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.mesh import keys, tcp
from meshlm.runtime.mesh.link import Inbox, Outbox
from meshlm.runtime.mesh.strangers import Strangers

NOTICE_S = 2.0  # how long a refusal may take to reach a stranger
MAX_NOTICES = 16

_decode_hello = msgspec.msgpack.Decoder(Hello).decode


class Remote:
    """The links of one process to other nodes. `sessions` are those with their processes, by `frames.sender_key`."""

    def __init__(self, identity: Identity, config: MeshConfig, node: Node) -> None:
        self.identity, self.node, self._network = identity, node, config.network
        self.address = ""
        self.silence_s = config.network.peer_timeout
        self.sessions: dict[bytes, Session] = {}
        self._port = _fixed_port(identity, config.network.listen) if not node.head else 0
        self._notices: list[tuple[Outbox, Rival, float]] = []

    @classmethod
    def of(cls, identity: Identity, config: MeshConfig) -> "Remote | None":
        """The process's, where it needs one."""
        if config.node is None or identity.role is Role.FRONTEND:
            return None
        return cls(identity, config, config.node)

    def open(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        on_frame: Callable[[bytes], None],
        on_drained: Callable[[], None],
        log: Any,
    ) -> None:
        """Bind and begin to read. ProcessFatal when the keys cannot be read or the address cannot be had."""
        loop = asyncio.get_running_loop()
        self._context = context
        try:
            mesh_keys = keys.load(self._network.key_file)
        except keys.KeyFileError as error:
            raise ProcessFatal(str(error)) from None
        self._tcp = tcp.Tcp(self.node.address, mesh_keys, self._network)
        self._doorman = tcp.Doorman(context, frozenset({mesh_keys.public}), log)
        self._doorman.start(loop)
        self._strangers = Strangers(log)

        def bind(sock: "zmq.Socket[bytes]") -> str:
            self._strangers.watch(sock, loop)
            return self._tcp.bind(sock, self._port)

        try:
            self._inbox = Inbox(context, "", on_frame, on_drained, bind)
        except zmq.ZMQError as error:
            self._strangers.close()
            self._doorman.close()
            raise ProcessFatal(f"{self._wanted(error)} ({self.identity})") from None
        self._inbox.start(loop)
        self.address = self._inbox.address
        if self._network.advertise_host:
            self.address = tcp.join(self._network.advertise_host, self.address.rpartition(":")[2])

    def _wanted(self, error: zmq.ZMQError) -> str:
        """Says which address could not be bound, and why."""
        if self._port or not self._network.mesh_port_range:
            return f"--listen {tcp.join(self.node.address, self._port or '*')}: {error.strerror}"
        reason = "no port is free" if error.errno == zmq.EADDRINUSE else error.strerror
        return f"--mesh-port-range {self._network.mesh_port_range} on {self.node.address}: {reason}"

    def well_known(self) -> dict[Identity, str]:
        """Processes of the head that this one looks for."""
        if not self.node.head:
            return {}
        host, port = tcp.parse(self.node.head)
        if self.identity.role is Role.SUPERVISOR:
            return {HEAD: tcp.join(host, port)}
        return {COORDINATOR: tcp.join(host, port + 1)}

    def is_here(self, identity: Identity) -> bool:
        """Whether this process is one of this node, so that nobody elsewhere can be it."""
        match identity.role:
            case Role.SUPERVISOR:
                return identity.index == self.node.index
            case Role.SCHEDULER:
                return _within(identity.index, self.node.ranks)
            case Role.WORKER:
                return _within(identity.index, self.node.workers)
        return not self.node.head

    def route(self, node: str, address: str, address_tcp: str) -> str:
        """The address at which this process reaches that one."""
        return address if node == self.node.id or not address_tcp else address_tcp

    def stranger(self, sender: Identity, body: memoryview) -> str:
        """The address for the answer to the first hello of a process of another node. FrameError when it cannot be one."""
        if self.is_here(sender):
            raise FrameError(f"claims to be {sender}, which is of this node")
        try:
            address = _decode_hello(body).tcp
            tcp.parse(address)
        except (*BAD_BODY, tcp.AddressError):
            raise FrameError(f"from {sender}, with a hello that has no address") from None
        return address

    def outbox(self, address: str) -> Outbox:
        """FrameError when there can be no such address."""
        try:
            return Outbox(self._context, address, self._tcp.prepare)
        except zmq.ZMQError as error:
            raise FrameError(f"address {address[:100]!r}: {error.strerror}") from None

    def add(self, session: Session) -> None:
        self.sessions[sender_key(session.peer)] = session

    def forget(self, peer: Identity) -> None:
        self.sessions.pop(sender_key(peer), None)

    def refuse(self, rival: Rival, now: float) -> None:
        """Tell a process that claims another's place, as soon as it is connected."""
        told = any(old.hello.tcp == rival.hello.tcp for _, old, _ in self._notices)
        if told or len(self._notices) >= MAX_NOTICES:
            return
        with contextlib.suppress(FrameError):  # where it says it is, nothing can be
            self._notices.append((self.outbox(rival.hello.tcp), rival, now + NOTICE_S))

    def tick(self, now: float) -> None:
        """Send what refusals can be sent; forget those whose time is over."""
        for notice in list(self._notices):
            outbox, rival, until = notice
            if now >= until:
                outbox.close()
                self._notices.remove(notice)
            else:
                outbox.push(rival.frame)

    def close(self) -> None:
        for outbox, _, _ in self._notices:
            outbox.close()
        if self.address:
            self._inbox.close()
            self._strangers.close()
            self._doorman.close()


def _fixed_port(identity: Identity, listen: str) -> int:
    """The ports that other nodes must know before they know anybody."""
    port = tcp.parse(listen)[1]
    return {HEAD: port, COORDINATOR: port + 1}.get(identity, 0)


def _within(index: int, places: tuple[int, int]) -> bool:
    return places[0] <= index < places[0] + places[1]
