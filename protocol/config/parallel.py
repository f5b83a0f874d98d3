"""How many ranks there are, and where they run: the settings of parallelism, of the network between nodes, and one node's place."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from meshlm.protocol.config.per_node import PER_NODE


class ParallelConfig(Struct, frozen=True, kw_only=True):
    """The number of ranks, and their places."""

    data_parallel_size: Annotated[int, Meta(ge=1, le=1024, description="schedulers", extra={"short": "-dp"})] = 1
    tensor_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="GPUs that share each layer", extra={"short": "-tp"})
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Meta(ge=1, le=64, description="stages that share the layers", extra={"short": "-pp"})
    ] = 1
    disable_custom_all_reduce: Annotated[
        bool, Meta(description="sums of tensor-parallel ranks go by NCCL alone, not through the memory of peers")
    ] = False
    data_parallel_size_local: (
        Annotated[int, Meta(ge=0, le=1024, description="schedulers of this node; default: the rest", extra=PER_NODE)]
        | None
    ) = None
    data_parallel_start_rank: Annotated[
        int, Meta(ge=0, le=1023, description="first rank of this node", extra=PER_NODE)
    ] = 0
    nnodes: Annotated[int, Meta(ge=1, le=1024, description="nodes over which all workers are spread evenly")] = 1
    node_rank: Annotated[int, Meta(ge=0, le=1023, description="which of --nnodes this is", extra=PER_NODE)] = 0
    master_addr: Annotated[
        str, Meta(description="address of torch.distributed's store; default: the head's", extra=PER_NODE)
    ] = ""
    master_port: Annotated[
        int,
        Meta(
            ge=1,
            le=65535,
            description="its port; rank R uses this + R, and ranks of several nodes that share experts the next two",
        ),
    ] = 29501

    dp_routing: Annotated[
        Literal["cache-aware", "least-loaded", "round-robin"], Meta(description="which rank takes a request")
    ] = "cache-aware"
    data_parallel_hybrid_lb: Annotated[
        bool, Meta(description="this node serves its own ranks; an outer balancer is over the nodes")
    ] = False
    data_parallel_external_lb: Annotated[
        bool, Meta(description="this mesh is one rank of several behind an outer balancer; needs --data-parallel-rank")
    ] = False
    data_parallel_rank: (
        Annotated[
            int,
            Meta(ge=0, le=1023, description="which rank this mesh is; implies external-lb", extra={"short": "-dpn"}),
        ]
        | None
    ) = None

    @property
    def workers_per_rank(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def step_ports(self) -> tuple[int, int]:
        """The ports at --master-addr where ranks of several nodes that step together meet, behind those of --master-port + R: of their
        store, and of what they agree on."""
        first = self.master_port + self.data_parallel_size
        return first, first + 1

    def nodes_of(self, rank: int) -> range:
        """The nodes, of --nnodes, that have workers of dp rank `rank`: all workers are spread evenly."""
        here = self.data_parallel_size * self.workers_per_rank // self.nnodes
        first = rank * self.workers_per_rank
        return range(first // here, (first + self.workers_per_rank - 1) // here + 1)


class NetworkConfig(Struct, frozen=True, kw_only=True):
    """The network of a mesh of several nodes."""

    listen: Annotated[
        str,
        Meta(
            description="tcp://HOST:PORT where other nodes may join; HOST: of the private interface, the only one used"
        ),
    ] = ""
    headless: Annotated[bool, Meta(description="run only schedulers and workers, for the head that --join names")] = (
        False
    )
    join: Annotated[str, Meta(description="tcp://HOST:PORT, the head's --listen")] = ""
    key_file: Annotated[str, Meta(description="the mesh's keys, from `meshlm keys`; tcp needs them")] = ""
    mesh_port_range: Annotated[str, Meta(description="FIRST-LAST: ports of the other tcp sockets; default: any")] = ""
    advertise_host: Annotated[
        str, Meta(description="address by which other nodes reach this one, where it is not its interface's (NAT)")
    ] = ""
    peer_timeout: Annotated[
        float, Meta(ge=0.1, le=3600, description="seconds of silence after which a process of another node is lost")
    ] = 3.0


class Node(Struct, frozen=True, kw_only=True):
    """The place of this supervisor's processes in a mesh of several nodes. It is never a flag."""

    index: int  # its supervisor is supervisor/index; 0 is the head
    id: str  # of host and run directory: processes with the same one reach each other by ipc
    address: str  # numeric, of the private interface: tcp sockets and torch.distributed's store bind to it alone
    interface: str = ""  # the name of the one that has this address, for gloo and NCCL; empty: none was found
    head: str = ""  # tcp://HOST:PORT of the head's supervisor; its coordinator listens on PORT + 1. Empty on the head
    host: str = ""  # the host's name, for people
    ranks: tuple[int, int] = (0, 0)  # first and number of its schedulers
    workers: tuple[int, int] = (0, 0)
