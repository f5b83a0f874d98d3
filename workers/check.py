"""What a worker would refuse before it reads weights, for `meshlm serve --dry-run` (runtime/process/checking.py).

Its part of the model is made on torch's meta device and held against the headers of the weights, so this takes seconds and no memory.
A GPU is asked for nothing: what its kernels cannot do is known when a worker has it.
"""

import contextlib

import torch

from meshlm.protocol.config import MeshConfig
from meshlm.runtime.errors import ContextTooLong, ProcessFatal
from meshlm.runtime.logits_processors import ProcessorError, loaded
from meshlm.runtime.process.checking import answer
from meshlm.workers import memory
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.engine.make import choose_backend, load_plug_ins
from meshlm.workers.operations import kind_of
from meshlm.workers.weights.load import DTYPES, described

CPU = torch.device("cpu")


def check(config: MeshConfig) -> None:
    """ProcessFatal, as a worker of the first rank would say it."""
    resolved, parallel = config.require_resolved(), config.parallel
    if resolved.device not in ("cpu", "cuda"):  # engines of their own
        return
    load_plug_ins()
    if config.worker.worker_extension_cls:
        kind_of(config.worker.worker_extension_cls)
    try:
        loaded(resolved.logits_processors)
    except ProcessorError as error:
        raise ProcessFatal(str(error)) from None
    size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    whole, redundant = config.experts.enable_expert_parallel, config.experts.num_redundant_experts
    for worker in sorted({stage * size + rank for stage in range(stages) for rank in (0, size - 1)}):
        _check(config, Shard.of_worker(parallel, worker, expert_parallel=whole, num_redundant=redundant))


def _check(config: MeshConfig, shard: Shard) -> None:
    """shard: the part of one worker."""
    resolved = config.require_resolved()
    dtype = DTYPES[resolved.dtype]
    if resolved.device == "cpu":
        backend = choose_backend(config, CPU, WorkerPlacement(shard))
        latent = resolved.spec.mla is not None
        held = memory.cache_dtype(config.cache.kv_cache_dtype, dtype, CPU, backend, latent=latent)
    else:
        held = dtype if config.cache.kv_cache_dtype == "auto" else torch.float8_e4m3fn
    with contextlib.suppress(ContextTooLong):  # --max-model-len auto: a start goes on with what fits
        memory.check_known(config, memory.layout_of(config, shard, held, dtype))
    if resolved.spec.transformers is None:
        torch.set_default_dtype(dtype)
        described(resolved, CPU, config.model.seed or 0, shard)


if __name__ == "__main__":
    answer(check)
