"""What operators ask of the mesh: operations of all workers, ranks' figures, changes that the supervisor makes. Owned by io.py."""

from functools import partial

from msgspec import Struct

from meshlm.frontend.http.errors import HttpError
from meshlm.frontend.operator.scaling import AskedRanks
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.edges.control import ChangeSettings, MeshStats
from meshlm.protocol.operations import Action, OperationDone
from meshlm.protocol.wire.ids import COORDINATOR, ErrorKind
from meshlm.runtime.client.mesh_client import MeshClient
from meshlm.runtime.mesh.mesh import Mesh
from meshlm.runtime.mesh.operations import AskedOperations
from meshlm.runtime.process.figures import Figures

CERTAIN_S = 20.0  # how long an operation waits for figures while the coordinator is replaced


class MeshOperations:
    """The operators' side of the links."""

    def __init__(self, client: MeshClient, figures: Figures) -> None:
        self._client, self._figures = client, figures
        self.asked = AskedOperations(lambda peer, message: self._mesh.send(peer, message))
        self.ranks = AskedRanks(self.tell_supervisor)

    @property
    def _mesh(self) -> Mesh:
        assert self._client.mesh is not None
        return self._client.mesh

    @property
    def config(self) -> MeshConfig:
        return self._mesh.config

    async def operate(self, action: Action) -> OperationDone:
        """Have it done in every worker."""
        try:
            return await self.asked.ask(action)
        except TimeoutError:
            raise HttpError(504, "the coordinator did not answer", kind="timeout_error") from None

    def change(self, values: dict[str, str | int | float]) -> None:
        """Ask the supervisor to have these settings in all processes. They were checked."""
        self.tell_supervisor(ChangeSettings(values))

    def tell_supervisor(self, message: Struct) -> None:
        self._mesh.tell_supervisor(message)

    async def fresh_stats(self) -> MeshStats:
        """The figures of each rank as of now, as far as the mesh tells them."""
        return await self._figures.fresh(partial(self._mesh.send, COORDINATOR))

    async def certain_stats(self) -> MeshStats:
        """Of this moment, for what is decided by them. HttpError where the coordinator does not come back in time."""
        try:
            return await self._figures.certain(partial(self._mesh.send, COORDINATOR), CERTAIN_S)
        except TimeoutError:
            raise HttpError.of_kind(ErrorKind.OVERLOADED, "the coordinator does not tell what the ranks do") from None
