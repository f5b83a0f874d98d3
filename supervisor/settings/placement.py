"""Which ranks, workers and processes this mesh and this node of it have, as the flags say. Pure.

Dense ranks never talk to each other, so behind an outer balancer each part is a mesh of its own, with the numbers that its ranks
have in the whole: in the label `engine` of /metrics, and in the header X-data-parallel-rank.
"""

import os

from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig, ParallelConfig
from meshlm.protocol.wire.ids import Identity, Role
from meshlm.supervisor.settings.rules import Rules, check

CORES_EACH = 8  # of this machine for a rank, a frontend and a detokenizer


def own_part(parallel: ParallelConfig) -> ParallelConfig:
    """The ranks that this mesh runs: their number, and in `data_parallel_rank` the first. UsageError for what cannot be."""
    check(_balancers(parallel))
    if parallel.data_parallel_hybrid_lb:  # one node of several, each a mesh of its own
        assert parallel.data_parallel_size_local is not None
        first, size = parallel.data_parallel_start_rank, parallel.data_parallel_size_local
        alone = {"data_parallel_size_local": None, "data_parallel_start_rank": 0}
        return replace(parallel, data_parallel_size=size, data_parallel_rank=first, **alone)
    if parallel.data_parallel_rank is None:
        return parallel
    return replace(parallel, data_parallel_size=1, data_parallel_external_lb=True)


def _balancers(p: ParallelConfig) -> Rules:
    """Who balances the load over data-parallel ranks: this mesh (internal), an outer balancer (external), or both (hybrid)."""
    rank, size = p.data_parallel_rank, p.data_parallel_size
    local, first = p.data_parallel_size_local, p.data_parallel_start_rank
    external, hybrid = p.data_parallel_external_lb or rank is not None, p.data_parallel_hybrid_lb
    why = "not together with --data-parallel-external-lb or --data-parallel-rank"
    yield external and hybrid, "--data-parallel-hybrid-lb", why
    why = "needs --data-parallel-size-local, the number of this node's ranks"
    yield hybrid and not local, "--data-parallel-hybrid-lb", why
    if hybrid and local:
        last = first + local - 1
        why = f"with --data-parallel-size-local {local} there would be ranks up to {last}, and --data-parallel-size {size} has 0 to"
        yield last >= size, f"--data-parallel-start-rank {first}", f"{why} {size - 1}"
    why = "needs --data-parallel-rank, the number of this mesh's rank"
    yield external and rank is None, "--data-parallel-external-lb", why
    beyond = external and rank is not None and rank >= size
    yield beyond, f"--data-parallel-rank {rank}", f"with --data-parallel-size {size} the ranks are 0 to {size - 1}"


def local_ranks(config: MeshConfig) -> tuple[range, range]:
    """The ranks whose schedulers, and the workers, that run on this node. UsageError when the flags contradict."""
    parallel = config.parallel
    per_rank, total = parallel.workers_per_rank, parallel.data_parallel_size
    if parallel.nnodes > 1:  # all workers evenly over the nodes; a scheduler is where its first worker is
        check(_even(parallel))
        here = total * per_rank // parallel.nnodes
        workers = range(parallel.node_rank * here, (parallel.node_rank + 1) * here)
        return range(-(-workers.start // per_rank), -(-workers.stop // per_rank)), workers
    check(_own(parallel))
    first, count = parallel.data_parallel_start_rank, parallel.data_parallel_size_local
    last = total if count is None else first + count
    return range(first, last), range(first * per_rank, last * per_rank)


def _even(p: ParallelConfig) -> Rules:
    own = p.data_parallel_size_local is not None or p.data_parallel_start_rank
    yield own, "--nnodes", "not together with --data-parallel-size-local and --data-parallel-start-rank"
    workers = p.data_parallel_size * p.workers_per_rank
    why = f"{workers} workers cannot be spread evenly over so many nodes"
    yield workers % p.nnodes, f"--nnodes {p.nnodes}", why
    yield p.node_rank >= p.nnodes, f"--node-rank {p.node_rank}", f"below --nnodes {p.nnodes}"


def _own(p: ParallelConfig) -> Rules:
    first, total, count = p.data_parallel_start_rank, p.data_parallel_size, p.data_parallel_size_local
    yield first >= total, f"--data-parallel-start-rank {first}", f"below --data-parallel-size {total}"
    why = f"with --data-parallel-start-rank {first} at most {total - first}, as --data-parallel-size is {total}"
    yield count is not None and first + count > total, f"--data-parallel-size-local {count}", why


def has_others(config: MeshConfig) -> bool:
    """Whether other nodes have some of the mesh's workers, as the flags say: `MeshConfig.node` is set later."""
    parallel = own_part(config.parallel)
    _, here = local_ranks(replace(config, parallel=parallel))
    return len(here) < parallel.data_parallel_size * parallel.workers_per_rank


def settled(config: MeshConfig) -> MeshConfig:
    """The same with the ranks that this mesh runs, where an outer balancer is over several, and all numbers of processes.

    Where the flags leave them open there are as many frontends and detokenizers as ranks, if there are cores for them.

    By its CPU time a detokenizer keeps up with about 50,000 tokens a second, which one GPU gives with a small model."""
    parallel, server = own_part(config.parallel), config.server
    usual = max(1, min(parallel.data_parallel_size, len(os.sched_getaffinity(0)) // CORES_EACH))
    counts = {"frontends": server.frontends or usual, "detokenizers": server.detokenizers or usual}
    return replace(config, parallel=parallel, server=replace(server, **counts))


def identities(config: MeshConfig) -> list[Identity]:
    """All processes of this node, in the order of starting: slow ones first. Of a settled configuration."""
    renders = config.resolved is not None and config.resolved.renders_only
    ranks, workers = (range(0), range(0)) if renders else local_ranks(config)
    rest = 0 if config.network.headless else 1
    numbers = {
        Role.WORKER: workers,
        Role.STORE: range(0 if renders else rest * config.kv_transfer.has_store),
        Role.MEDIA: range(0 if renders else rest * config.has_media),
        Role.COORDINATOR: range(rest),
        Role.SCHEDULER: ranks,
        Role.DETOKENIZER: range(rest * config.server.detokenizers),
        Role.FRONTEND: range(rest * config.server.frontends),
    }
    return [Identity(role, index) for role, indices in numbers.items() for index in indices]


def node_index(config: MeshConfig) -> int:
    """The number of this node, which is its supervisor's."""
    if not config.network.headless:
        return 0
    return config.parallel.node_rank or config.parallel.data_parallel_start_rank + 1
