"""In the place of supervisor/io.py: what a node's supervisor tells of deaths and of ranks. Between nodes the real Head and Guest."""

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from meshlm.protocol.edges import control
from meshlm.protocol.operations import Action, Operation, OperationId
from meshlm.protocol.wire.ids import COORDINATOR, Identity, Incarnation, Role
from meshlm.runtime.errors import LinkDown
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.supervisor.nodes.network import Guest, Head


class Supervisor:
    """See the module docstring. World starts and kills processes, and calls `on_death`."""

    def __init__(self) -> None:
        self._dead: dict[Identity, control.Died] = {}
        self._mesh: Mesh | None = None
        self._ranks: control.SetRanks | None = None
        self.num_asked = 0  # operations
        self.changed_settings: dict[str, str | int | float] = {}
        self._network: Head | Guest | None = None

    async def start(self, mesh: Mesh) -> dict[str, str]:
        self._mesh = mesh
        if (node := mesh.config.node) is not None:
            own: Any = self
            self._network = Guest(mesh.config, own, lambda: 0.0) if node.head else Head(mesh.config, own)
        return {}

    def set_ranks(self, num_ranks: int) -> None:
        """A change of their number as the coordinator sees it; the processes stay."""
        self._ranks = control.SetRanks(num_ranks)
        self._tell_ranks()

    def set_roles(self, num_prefill_ranks: int, num_ranks: int) -> None:
        """As an operator asks for it, of all processes."""
        self.changed_settings = {"dp_roles": f"prefill:{num_prefill_ranks},decode:{num_ranks - num_prefill_ranks}"}
        assert self._mesh is not None
        for role in Role:
            for peer in self._mesh.peers(role):
                self._mesh.send(peer, control.ChangeSettings(self.changed_settings))

    def operate(self, action: Action) -> None:
        """As an operator asks for it."""
        assert self._mesh is not None
        self.num_asked += 1
        if COORDINATOR in self._mesh.peers(Role.COORDINATOR):
            operation = Operation(OperationId(f"operation {self.num_asked}"), action)
            self._mesh.send(COORDINATOR, operation)

    def _tell_ranks(self) -> None:
        assert self._mesh is not None
        if self._ranks is not None and COORDINATOR in self._mesh.peers(Role.COORDINATOR):
            self._mesh.send(COORDINATOR, self._ranks)

    def on_death(self, died: control.Died) -> None:
        """Of one of this node's."""
        self.tell_died(died)
        if self._network is not None:
            self._network.died(died)

    # --- Own, for Head and Guest ---

    def tell_died(self, died: control.Died) -> None:
        assert self._mesh is not None
        if self._dead.setdefault(died.identity, died).incarnation > died.incarnation:
            return
        self._dead[died.identity] = died
        for role in Role:
            for peer in self._mesh.peers(role):
                if peer.role is not Role.SUPERVISOR:
                    self._mesh.send(peer, died)

    def deaths(self) -> Iterable[control.Died]:
        return self._dead.values()

    def send(self, peer: Identity, message: Struct) -> bool:
        assert self._mesh is not None
        try:
            self._mesh.send(peer, message)
        except LinkDown:
            return False
        return True

    def line(self, text: str) -> None:
        assert self._mesh is not None
        self._mesh.log.debug(text)

    def begin(self) -> None:
        """Its processes are started by the history, whether or not the head can be reached."""

    def fail(self, message: str) -> None:
        raise AssertionError(f"a node gives up: {message}")

    # --- App ---

    def on_peer_up(self, peer: Identity, incarnation: Incarnation) -> None:
        if peer.role is Role.SUPERVISOR:
            if self._network is not None:
                self._network.on_up(peer)
            return
        if self._mesh is not None:
            for died in self._dead.values():
                self._mesh.send(peer, died)
        if peer == COORDINATOR:
            self._tell_ranks()

    def on_message(self, peer: Identity, message: Struct) -> None:
        if peer.role is Role.SUPERVISOR and self._network is not None:
            self._network.on_message(peer, message)

    def on_peer_down(self, peer: Identity, incarnation: Incarnation, reason: str) -> None:
        if peer.role is Role.SUPERVISOR and self._network is not None:
            self._network.on_down(peer, reason)

    def flush(self) -> None: ...
    def beat(self) -> tuple[int, str]:
        return 0, ""

    def num_requests(self) -> int:
        return 0

    async def drain(self, limit_s: float) -> None: ...
    async def stop(self) -> None: ...
