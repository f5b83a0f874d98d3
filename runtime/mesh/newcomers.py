"""Whom a process lets open a link with it unasked, so that forged hellos cannot take its descriptors. Pure; owned by mesh.py.

The places of the configuration may always come. Others (ranks of a mesh that is being scaled out, a client's process) may come before
the coordinator's list names them: MAX_NEWCOMERS at a time, and they are forgotten unless it does so within EXPIRES_S. One that is
forgotten or turned away says hello again.
"""

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.wire.channels import are_linked
from meshlm.protocol.wire.frames import FrameError
from meshlm.protocol.wire.ids import Identity, Role

MAX_NEWCOMERS = 64
MAX_CALLERS = 4096  # of the coordinator and the supervisors, to whom all come first, and whom nobody tells
EXPIRES_S = 10.0


class Newcomers:
    """`expected`: how many places of each role the configuration has."""

    def __init__(self, me: Identity, config: MeshConfig) -> None:
        parallel, server = config.parallel, config.server
        self._me, self._workers_per_rank = me, parallel.workers_per_rank
        self._shares_pages = config.kv_transfer.shares_pages
        self.expected = {
            Role.SUPERVISOR: max(1, parallel.nnodes),
            Role.COORDINATOR: 1,
            Role.FRONTEND: max(1, server.frontends),
            Role.DETOKENIZER: max(1, server.detokenizers),
            Role.SCHEDULER: parallel.data_parallel_size,
            Role.WORKER: parallel.data_parallel_size * parallel.workers_per_rank,
            Role.STORE: int(config.kv_transfer.has_store),
            Role.MEDIA: int(config.has_media),
        }
        self.named: frozenset[Identity] = frozenset()  # by the coordinator
        self.here: set[Identity] = set()  # those that came unasked and are not expected

    @property
    def most(self) -> int:
        return MAX_CALLERS if self._me.role in (Role.COORDINATOR, Role.SUPERVISOR) else MAX_NEWCOMERS

    def may_stay(self, peer: Identity) -> bool:
        """Whether its link needs nobody to name it; if not, it is to be noted in `here`. FrameError when it may not come at all."""
        if not are_linked(self._me, peer, self._workers_per_rank, self._shares_pages):
            raise FrameError(f"from {peer}, with which {self._me} has no channel")
        if peer.index < self.expected[peer.role] or peer in self.named:
            return True
        if len(self.here) >= self.most:
            raise FrameError(f"from {peer}, which nobody knows, as {self.most} others that have come already")
        return False

    def name(self, members: frozenset[Identity]) -> None:
        """The coordinator's list."""
        self.named = members
        self.here -= members
