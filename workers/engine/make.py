"""Makes the engine that a device gets. Called once, in the stepper thread; imports torch, and Triton only where it is used."""

import gc
import os
from collections.abc import Callable

import structlog
import torch
from msgspec.structs import replace

from meshlm.protocol.config import MeshConfig
from meshlm.protocol.layers import Layers, LayerSpec
from meshlm.protocol.model import ModelSpec
from meshlm.runtime import platforms, plugins
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.logits_processors import ProcessorError
from meshlm.workers import memory
from meshlm.workers.attention import backend as backends
from meshlm.workers.attention.backend import Backend
from meshlm.workers.cuda import start
from meshlm.workers.cuda.start import check_gpu
from meshlm.workers.distributed.membership import Membership
from meshlm.workers.distributed.placement import WorkerPlacement
from meshlm.workers.engine import ProgressReport
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.engine.kit import TorchKit
from meshlm.workers.layers import cpu_ops
from meshlm.workers.states.torch_states import WrongStates
from meshlm.workers.weights.load import DTYPES

_log = structlog.get_logger()


def worker_engine(config: MeshConfig, worker: int, membership: Membership, report: ProgressReport) -> ModelEngine:
    """The engine of `--device cpu` and `cuda` for worker number `worker`. ProcessFatal."""
    load_plug_ins()
    try:
        return make_engine(config, report, WorkerPlacement.of(config, worker, membership))
    except ProcessorError as error:
        raise ProcessFatal(str(error)) from None


def load_plug_ins() -> None:
    """Those that a model engine reads. ProcessFatal."""
    try:
        plugins.load_descriptions(os.environ)
        plugins.load(plugins.BACKENDS, os.environ, backends.register)
    except plugins.PluginError as error:
        raise ProcessFatal(str(error)) from None


def make_engine(config: MeshConfig, report: ProgressReport, placement: WorkerPlacement | None = None) -> ModelEngine:
    """Makes the engine of the configured device, on which this thread computes from now on."""
    placement = placement or WorkerPlacement()
    if config.require_resolved().device == "cpu":
        if config.worker.deterministic and not cpu_ops.available():
            raise ProcessFatal(
                "--deterministic: not proven without the compiled kernels, which need a C compiler; leave it out"
            )
        torch.set_num_threads(config.worker.cpu_threads or len(os.sched_getaffinity(0)))
        return torch_engine(config, torch.device("cpu"), TorchKit(), report, placement)
    return _gpu_engine(config, report, placement)


def torch_engine(
    config: MeshConfig, device: torch.device, kit: TorchKit, report: ProgressReport, placement: WorkerPlacement
) -> ModelEngine:
    """The engine on a device of torch without CUDA graphs; a platform of another package may bring its own kit."""
    torch.set_grad_enabled(False)
    return ModelEngine(config, device, choose_backend(config, device, placement), kit, report, placement)


def _gpu_engine(config: MeshConfig, report: ProgressReport, placement: WorkerPlacement) -> ModelEngine:
    torch.set_grad_enabled(False)
    check_gpu()
    gpu = placement.take_gpu()
    if config.worker.deterministic:
        return _in_memory(lambda: _invariant_engine(config, gpu, report, placement))
    backend = choose_backend(config, gpu, placement)
    if not backend.graphs:
        _say_why(config, gpu, placement)
        return _in_memory(lambda: ModelEngine(config, gpu, backend, TorchKit(), report, placement))
    from meshlm.workers.engine.triton_kit import TritonKit

    try:
        return _in_memory(
            lambda: start.retry_without(
                lambda: ModelEngine(config, gpu, backend, TritonKit(), report, placement),
                start.folder(),
                alone=placement.shard.size == 1,
            )
        )
    except WrongStates as error:
        reason = str(error)
    return _in_memory(lambda: _without_kernels(config, gpu, report, placement, reason))


def _invariant_engine(
    config: MeshConfig, gpu: torch.device, report: ProgressReport, placement: WorkerPlacement
) -> ModelEngine:
    """The engine of --deterministic on a GPU. ProcessFatal where it is not proven for this GPU."""
    from meshlm.workers.attention.invariant_backend import InvariantBackend
    from meshlm.workers.engine.invariant_kit import InvariantKit

    backend, resolved = InvariantBackend(), config.require_resolved()
    spec, size = _with_pages(config, resolved.spec, placement)
    if reason := backend.unsupported(spec, gpu, DTYPES[resolved.dtype], size):
        raise ProcessFatal(f"--deterministic: {reason}; leave it out")
    return start.retry_without(
        lambda: ModelEngine(config, gpu, backend, InvariantKit(), report, placement),
        start.folder(),
        alone=placement.shard.size == 1,
    )


def _without_kernels(
    config: MeshConfig, gpu: torch.device, report: ProgressReport, placement: WorkerPlacement, reason: str
) -> ModelEngine:
    """The engine by plain torch, of a model whose recurrent states the kernels have got wrong. ProcessFatal where kernels were asked
    for by name, or others are in the middle of the start."""
    if placement.shard.size > 1 or config.worker.attention_backend != "auto":
        raise ProcessFatal(
            f"--attention-backend {config.worker.attention_backend}: on this GPU {reason}; use --attention-backend torch"
        )
    _log.warning("plain torch computes: the kernels of recurrent states are not right here", reason=reason)
    gc.collect()  # the first engine, weights and all
    torch.cuda.empty_cache()
    return ModelEngine(config, gpu, backends.BACKENDS["torch"](), TorchKit(), report, placement)


def choose_backend(config: MeshConfig, device: torch.device, placement: WorkerPlacement) -> Backend:
    """The attention of this worker. ProcessFatal says why there is none as it was asked for."""
    name, whole = config.worker.attention_backend, config.require_resolved().spec
    order = platforms.named(config.require_resolved().device).attention_backends
    if config.cache.kv_cache_dtype != "auto":  # a named backend that cannot read it is refused (memory.cache_dtype)
        order = tuple(name for name in order if name not in backends.BACKENDS or backends.BACKENDS[name]().fp8)
    if whole.state is not None and config.lockstep:  # whose kernels are not tried while others step beside them
        order = tuple(name for name in order if name != "triton")
    spec, size = _with_pages(config, whole, placement)
    return backends.choose(name, spec, device, DTYPES[config.require_resolved().dtype], size, order)


def _with_pages(config: MeshConfig, spec: ModelSpec, placement: WorkerPlacement) -> tuple[ModelSpec, int]:
    """This worker's part of the model, its states named as the cache holds them, and the tokens of a block: states and audio make it
    longer. A stage of a pipeline without states has such blocks too, and so counts as one that has them. spec: of the whole model."""
    resolved, cache, shard = config.require_resolved(), config.cache, placement.shard
    local = shard.local(spec)
    if spec.state is None and spec.audio_encoder is None:
        return local, cache.block_size
    dtype = DTYPES[resolved.dtype]
    held = dtype if cache.kv_cache_dtype == "auto" else torch.float8_e4m3fn
    layout = memory.layout_of(config, shard, held, dtype)
    if layout.states is None or spec.state is None:
        return local, layout.block_size
    if local.state is None:
        stateful = LayerSpec(state=shard.local_state(spec.state))
        local = replace(local, layers=Layers.from_records([*local.layers, stateful]))
    ssm = str(layout.states.ssm).removeprefix("torch.")
    return local.with_state_dtype(ssm), layout.block_size


def _say_why(config: MeshConfig, gpu: torch.device, placement: WorkerPlacement) -> None:
    """Log why plain torch computes on this GPU, where nobody asked for it."""
    resolved, name = config.require_resolved(), config.worker.attention_backend
    if name == "auto":
        triton = backends.BACKENDS["triton"]()
        spec, size = _with_pages(config, resolved.spec, placement)
        reason = triton.unsupported(spec, gpu, DTYPES[resolved.dtype], size)
        _log.warning("plain torch computes: no --attention-backend triton here", reason=reason)


def _in_memory(make: Callable[[], ModelEngine]) -> ModelEngine:
    try:
        return make()
    except torch.OutOfMemoryError as error:
        raise ProcessFatal(
            f"the GPU's memory is full: {str(error).splitlines()[0]} Lower --gpu-memory-utilization, "
            "--max-num-seqs or --max-num-batched-tokens"
        ) from None
