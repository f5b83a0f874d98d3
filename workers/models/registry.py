"""The class that computes a model, and another way of computing a whole decoder, if there is one (decoder.py: LayerExecutor)."""

from functools import partial
from importlib import import_module

import structlog
import torch

from meshlm.architectures.registry import architectures, family_of
from meshlm.protocol.config.engine import WorkerConfig
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.models.decoder import Decoder

_log = structlog.get_logger()


def model_class(spec: ModelSpec) -> type[Decoder]:
    """The module for this architecture. ProcessFatal lists those that exist."""
    family = family_of(spec.architecture)
    if family is None:
        known = ", ".join(sorted(architectures()))
        raise ProcessFatal(f"architecture {spec.architecture} is not supported; supported: {known}")
    module, _, name = family.model.partition(":")
    found: type[Decoder] = getattr(import_module(module), name)
    return found


def choose_layer_executor(model: Decoder, worker: WorkerConfig, attention: str, dtype: torch.dtype) -> None:
    """attention: the name of the backend, which has kernels for whole layers on the CPU."""
    if worker.compile != "none":
        from meshlm.workers.models import compiled  # imports torch's compiler: two seconds

        folder = compiled.use_cache(model.spec, dtype, compiled.cache_root())
        _log.info("torch.compile", backend=worker.compile, cache=str(folder))
        compiler = partial(torch.compile, backend=worker.compile)
        model.executor = compiled.CompiledLayers(model.spec, compiler, worker.compile_dynamic_shapes)
    elif model.spec.encoder_only:
        from meshlm.workers.models.cpu_layers import fuse_encoder

        fuse_encoder(model)
    elif attention == "cpu":
        from meshlm.workers.models.cpu_layers import fuse_decoder

        fuse_decoder(model, attention)
