"""The whole configuration as one frozen Struct tree, checked when it is built.

The command line and the TOML file are generated from it: a field's flag is its name with dashes, its description the help
text; `extra` may add a short flag ({"short": "-tp"}) or say that the value is a size ({"bytes": True}: 4G, 512M). The
supervisor hands the resolved tree to every child in memory (JSON); a child reads only that.
"""

from msgspec import Struct

from meshlm.protocol.config.adapters import AdapterConfig
from meshlm.protocol.config.engine import CacheConfig, SchedulerConfig, WorkerConfig
from meshlm.protocol.config.experts import ExpertConfig
from meshlm.protocol.config.kv_events import KVEventsConfig
from meshlm.protocol.config.kv_transfer import KVTransferConfig
from meshlm.protocol.config.media import MediaConfig
from meshlm.protocol.config.model import ModelConfig
from meshlm.protocol.config.observability import ObservabilityConfig
from meshlm.protocol.config.parallel import NetworkConfig, Node, ParallelConfig
from meshlm.protocol.config.per_node import PER_NODE
from meshlm.protocol.config.resolved import Resolved
from meshlm.protocol.config.run import RunConfig
from meshlm.protocol.config.server import ServerConfig
from meshlm.protocol.config.speculative import SpeculativeConfig
from meshlm.protocol.config.structured_outputs import StructuredOutputsConfig

__all__ = [
    "PER_NODE",
    "AdapterConfig",
    "CacheConfig",
    "ExpertConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "MediaConfig",
    "MeshConfig",
    "ModelConfig",
    "NetworkConfig",
    "Node",
    "ObservabilityConfig",
    "ParallelConfig",
    "Resolved",
    "RunConfig",
    "SchedulerConfig",
    "ServerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "WorkerConfig",
]


class MeshConfig(Struct, frozen=True, kw_only=True):
    """The configuration that every process reads at start."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    kv_transfer: KVTransferConfig = KVTransferConfig()
    kv_events: KVEventsConfig = KVEventsConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    worker: WorkerConfig = WorkerConfig()
    parallel: ParallelConfig = ParallelConfig()
    experts: ExpertConfig = ExpertConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    adapters: AdapterConfig = AdapterConfig()
    media: MediaConfig = MediaConfig()
    server: ServerConfig = ServerConfig()
    network: NetworkConfig = NetworkConfig()
    run: RunConfig = RunConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    resolved: Resolved | None = None  # set by the supervisor before any child starts
    node: Node | None = None  # likewise; None: one node, no tcp

    def require_resolved(self) -> Resolved:
        """What is resolved: of a configuration for which that was done, as it was for every child's."""
        assert self.resolved is not None
        return self.resolved

    @property
    def has_media(self) -> bool:
        """Whether requests may have images, video or audio: the model takes them, and the flags leave it some."""
        spec = self.resolved.spec.media if self.resolved is not None else None
        return spec is not None and any(self.media.limit_of(modality) for modality in spec.modalities)

    @property
    def steps_over_nodes(self) -> bool:
        """Whether ranks of other nodes step together with this node's."""
        num_workers = self.parallel.data_parallel_size * self.parallel.workers_per_rank
        return self.lockstep and self.node is not None and self.node.workers[1] < num_workers

    @property
    def lockstep(self) -> bool:
        """Whether the data-parallel ranks step together, since they share experts. Those of dense models never do."""
        share_experts = self.experts.enable_expert_parallel and self.parallel.data_parallel_size > 1
        return share_experts or self.worker.fake_lockstep
