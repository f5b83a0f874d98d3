"""Chooses another way of computing a whole decoder when a model is loaded, if there is one (decoder.py: LayerExecutor)."""

from functools import partial

import structlog
import torch

from meshlm.protocol.config.engine import WorkerConfig
from meshlm.workers.models.decoder import Decoder

_log = structlog.get_logger()


def choose_layer_executor(model: Decoder, worker: WorkerConfig, attention: str, dtype: torch.dtype) -> None:
    """attention: the name of the backend, which has kernels for whole layers on the CPU."""
    if worker.compile != "none":
        from meshlm.workers.models import compiled  # imports torch's compiler: two seconds

        folder = compiled.use_cache(model.spec, dtype, compiled.cache_root())
        _log.info("torch.compile", backend=worker.compile, cache=str(folder))
        compiler = partial(torch.compile, backend=worker.compile)
        model.executor = compiled.CompiledLayers(model.spec, compiler, worker.compile_dynamic_shapes)
    elif model.spec.encoder_only:
        from meshlm.workers.models import cpu_encoder

        cpu_encoder.fuse(model)
    elif attention == "cpu":
        from meshlm.workers.models.cpu_layers import fuse

        fuse(model, attention)
