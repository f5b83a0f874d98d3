"""Finds out who balances the load over data-parallel ranks: this mesh (internal), an outer balancer (external), or both (hybrid). Pure.

Dense ranks never talk to each other, so behind an outer balancer each part is a mesh of its own, with the numbers that its ranks
have in the whole: in the label `engine` of /metrics, and in the header X-data-parallel-rank.
"""

import msgspec

from meshlm.protocol.config import ParallelConfig
from meshlm.supervisor.errors import UsageError


def own_part(parallel: ParallelConfig) -> ParallelConfig:
    """The ranks that this mesh runs: their number, and in `data_parallel_rank` the first. UsageError for what cannot be."""
    rank, size = parallel.data_parallel_rank, parallel.data_parallel_size
    external = parallel.data_parallel_external_lb or rank is not None
    if external and parallel.data_parallel_hybrid_lb:
        raise UsageError(
            "--data-parallel-hybrid-lb: not together with --data-parallel-external-lb or --data-parallel-rank"
        )
    if parallel.data_parallel_hybrid_lb:
        return _node(parallel)
    if not external:
        return parallel
    if rank is None:
        raise UsageError("--data-parallel-external-lb: needs --data-parallel-rank, the number of this mesh's rank")
    if rank >= size:
        raise UsageError(f"--data-parallel-rank {rank}: with --data-parallel-size {size} the ranks are 0 to {size - 1}")
    return msgspec.structs.replace(parallel, data_parallel_size=1, data_parallel_external_lb=True)


def _node(parallel: ParallelConfig) -> ParallelConfig:
    """One node of several, each a mesh of its own."""
    size, local, first = (
        parallel.data_parallel_size,
        parallel.data_parallel_size_local,
        parallel.data_parallel_start_rank,
    )
    if not local:
        raise UsageError("--data-parallel-hybrid-lb: needs --data-parallel-size-local, the number of this node's ranks")
    if first + local > size:
        raise UsageError(
            f"--data-parallel-start-rank {first}: with --data-parallel-size-local {local} there would be ranks up to "
            f"{first + local - 1}, and --data-parallel-size {size} has 0 to {size - 1}"
        )
    return msgspec.structs.replace(
        parallel,
        data_parallel_size=local,
        data_parallel_rank=first,
        data_parallel_size_local=None,
        data_parallel_start_rank=0,
    )
