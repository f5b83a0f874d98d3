"""Whether a mixture of experts can be spread over ranks as the flags say; asked before any process starts. No torch."""

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.model import ModelSpec
from meshlm.supervisor.errors import UsageError

PARALLEL = "--enable-expert-parallel"


def check(config: MeshConfig, spec: ModelSpec) -> None:
    """UsageError names the flag, and what would do."""
    experts, parallel = config.experts, config.parallel
    if not experts.enable_expert_parallel:
        if experts.enable_dbo:
            raise UsageError(f"--enable-dbo: it needs {PARALLEL}")
        return
    if spec.moe is None:
        raise UsageError(f"{PARALLEL}: {spec.architecture} has no experts; leave it out")
    num_ranks, count = parallel.data_parallel_size * parallel.tensor_parallel_size, spec.moe.num_experts
    if count % num_ranks:
        fit = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        sizes = f"--data-parallel-size {parallel.data_parallel_size} x --tensor-parallel-size {parallel.tensor_parallel_size}"
        raise UsageError(f"{PARALLEL}: {num_ranks} ranks ({sizes}) do not divide the model's {count} experts; {fit} do")
    if experts.enable_dbo and parallel.data_parallel_size == 1:
        raise UsageError("--enable-dbo: it needs --data-parallel-size 2 or more; without, no tokens travel")
    if parallel.data_parallel_external_lb or parallel.data_parallel_hybrid_lb:
        raise UsageError(f"{PARALLEL}: the ranks of several meshes behind an outer balancer cannot share experts")
    if not config.lockstep:
        return
    if config.node is not None:
        raise UsageError(f"{PARALLEL}: data-parallel ranks that share experts must be on one node")
    if parallel.pipeline_parallel_size > 1:
        raise UsageError(f"{PARALLEL}: with --data-parallel-size above 1 there is no pipeline; leave out -pp")
