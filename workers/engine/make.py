"""Makes the engine that a device gets. Called once, in the stepper thread; imports torch, and Triton only where it is used."""

import os
from collections.abc import Callable

import structlog
import torch

from meshlm.protocol.config import MeshConfig
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.attention import backend as backends
from meshlm.workers.attention.backend import Backend
from meshlm.workers.cuda import kernel_cache
from meshlm.workers.cuda.checks import check_gpu
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.engine import ProgressReport
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.kit import TorchKit
from meshlm.workers.weights.load import DTYPES

_log = structlog.get_logger()


def make_engine(config: MeshConfig, report: ProgressReport, placement: WorkerPlacement | None = None) -> ModelEngine:
    """Makes the engine of the configured device, on which this thread computes from now on."""
    assert config.resolved is not None
    placement = placement or WorkerPlacement()
    torch.set_grad_enabled(False)
    if config.resolved.device == "cpu":
        torch.set_num_threads(config.worker.cpu_threads or len(os.sched_getaffinity(0)))
        cpu = torch.device("cpu")
        return ModelEngine(config, cpu, _backend(config, cpu, placement), TorchKit(), report, placement)
    check_gpu()
    gpu = placement.take_gpu()
    backend = _backend(config, gpu, placement)
    if not backend.graphs:
        _say_why(config, gpu)
        return _in_memory(lambda: ModelEngine(config, gpu, backend, TorchKit(), report, placement))
    from meshlm.workers.engine.triton_kit import TritonKit

    return _in_memory(
        lambda: kernel_cache.retry_without(
            lambda: ModelEngine(config, gpu, backend, TritonKit(), report, placement),
            kernel_cache.folder(),
            alone=placement.shard.size == 1,
        )
    )


def _backend(config: MeshConfig, device: torch.device, placement: WorkerPlacement) -> Backend:
    assert config.resolved is not None
    name, spec = config.worker.attention_backend, placement.shard.local(config.resolved.spec)
    return backends.choose(name, spec, device, DTYPES[config.resolved.dtype], config.cache.block_size)


def _say_why(config: MeshConfig, gpu: torch.device) -> None:
    """Log why plain torch computes on this GPU, where nobody asked for it."""
    resolved, name = config.resolved, config.worker.attention_backend
    assert resolved is not None
    if name == "auto":
        triton = backends.BACKENDS["triton"]()
        reason = triton.unsupported(resolved.spec, gpu, DTYPES[resolved.dtype], config.cache.block_size)
        _log.warning("plain torch computes: no --attention-backend triton here", reason=reason)


def _in_memory(make: Callable[[], ModelEngine]) -> ModelEngine:
    try:
        return make()
    except torch.OutOfMemoryError as error:
        raise ProcessFatal(
            f"the GPU's memory is full: {str(error).splitlines()[0]} Lower --gpu-memory-utilization, "
            "--max-num-seqs or --max-num-batched-tokens"
        ) from None
