"""Whether a mixture of experts can be spread over ranks as the flags say; asked before any process starts. No torch."""

import msgspec

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.model import ModelSpec
from meshlm.supervisor.errors import UsageError
from meshlm.supervisor.settings import layout

PARALLEL = "--enable-expert-parallel"
COMMUNICATORS = {"cpu": "torch_gloo", "cuda": "torch_nccl"}


def check(config: MeshConfig, spec: ModelSpec, device: str) -> None:
    """UsageError names the flag, and what would do."""
    experts, parallel = config.experts, config.parallel
    _check_balancing(config, spec, device)
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
    if config.worker.enable_sleep_mode:
        raise UsageError(
            f"--enable-sleep-mode: ranks that share experts ({PARALLEL}, --data-parallel-size 2 or more) do not sleep; leave it out"
        )
    if experts.all2all_backend == "peer_memory" and device == "cpu":
        raise UsageError("--all2all-backend peer_memory: it needs GPUs; use allgather_reducescatter or all_to_all")
    if layout.has_others(config):
        raise UsageError(f"{PARALLEL}: data-parallel ranks that share experts must be on one node")
    if parallel.pipeline_parallel_size > 1:
        raise UsageError(f"{PARALLEL}: with --data-parallel-size above 1 there is no pipeline; leave out -pp")


def notes(config: MeshConfig, max_num_seqs: int, max_num_batched_tokens: int) -> list[str]:
    """That --enable-dbo halves no step: a step of decodes has a token for each request, one with prompts up to its budget."""
    settings = config.experts
    decode, prefill = (
        settings.dbo_decode_token_threshold,
        settings.prefill_threshold(config.parallel.data_parallel_size),
    )
    if not settings.enable_dbo or max(2, decode) <= max_num_seqs or prefill <= max_num_batched_tokens:
        return []
    return [
        f"--enable-dbo: no step is halved: --dbo-prefill-token-threshold is {prefill} and a step has at most {max_num_batched_tokens} "
        f"tokens, --dbo-decode-token-threshold is {decode} and at most {max_num_seqs} requests decode; lower one of them "
        "(docs/moe.md has what halves gain)"
    ]


def _check_balancing(config: MeshConfig, spec: ModelSpec, device: str) -> None:
    experts, parallel = config.experts, config.parallel
    try:
        eplb = experts.eplb
    except msgspec.DecodeError as error:
        raise UsageError(f"--eplb-config {experts.eplb_config}: {error}") from None
    if not experts.enable_eplb:
        if experts.eplb_config != type(experts)().eplb_config:
            raise UsageError("--eplb-config: it goes with --enable-eplb")
        return
    if not experts.enable_expert_parallel:
        raise UsageError(f"--enable-eplb: it needs {PARALLEL}")
    if parallel.data_parallel_size == parallel.tensor_parallel_size == 1:
        raise UsageError(
            "--enable-eplb: it needs --data-parallel-size or --tensor-parallel-size 2; experts move between ranks"
        )
    if parallel.data_parallel_size == 1 and (parallel.pipeline_parallel_size > 1 or layout.has_others(config)):
        raise UsageError("--enable-eplb: tensor-parallel ranks that move experts are one stage, on one node")
    if eplb.use_async:
        raise UsageError("--eplb-config use_async: experts move between two steps, not beside them; leave it out")
    if eplb.communicator not in (None, COMMUNICATORS.get(device)):
        raise UsageError(
            f"--eplb-config communicator {eplb.communicator}: with --device {device} it is torch_gloo on CPUs, torch_nccl on GPUs"
        )
    _check_redundancy(config, spec, eplb.num_redundant_experts)


def _check_redundancy(config: MeshConfig, spec: ModelSpec, redundant: int) -> None:
    flag, parallel = f"--eplb-config num_redundant_experts {redundant}", config.parallel
    num_ranks = parallel.data_parallel_size * parallel.tensor_parallel_size
    if redundant % num_ranks:
        raise UsageError(f"{flag}: {num_ranks} ranks that share experts do not divide it; give a multiple")
    ranks = parallel.data_parallel_size if parallel.data_parallel_size > 1 else parallel.tensor_parallel_size
    most = 0 if spec.moe is None else spec.moe.num_experts * (ranks - 1)
    if redundant > most:
        raise UsageError(f"{flag}: with {most} every rank has all experts; give at most that")
