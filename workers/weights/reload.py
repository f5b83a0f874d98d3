"""Reads weights again into a model that computes: new values in the tensors that are there, so CUDA graphs and fused kernels stay.

The model is made once more, some modules at a time: their tensors are loaded and brought into the form of their formats as at the
start, and are copied over those of the running model. So no format knows of it, and only a few layers need memory twice.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from meshlm.protocol.config import Resolved
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.layers.summing_ops import SummingOps
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights.check import check_finite
from meshlm.workers.weights.gguf_form import WeightsPlan
from meshlm.workers.weights.load import DTYPES, default_dtype, fill, make_tensors, planned
from meshlm.workers.weights.model_tensors import held_by, tensors_by_path

PASS_BYTES = 2 << 30
"""Modules of so many bytes are loaded at a time; each time all names of the files are gone through."""


def reload_weights(
    model: Decoder,
    resolved: Resolved,
    device: torch.device,
    seed: int,
    plan: WeightsPlan | None = None,
    *,
    only_experts: bool = False,
    pass_bytes: int = PASS_BYTES,
) -> None:
    """After `load_model` with the same arguments: this shard's weights as the files have them now. only_experts: this rank's own, into
    the slots that they had at the start. ProcessFatal where they cannot be read; then part of the model may have other weights."""
    with default_dtype(DTYPES[resolved.dtype]), torch.inference_mode():
        fresh, tensors, kept, *_ = planned(resolved, device, seed, model.shard, plan)
        fresh.ops = model.ops.base if isinstance(model.ops, SummingOps) else model.ops
        for names in _passes(fresh, pass_bytes, only_experts=only_experts):
            for name in names:
                make_tensors(fresh.get_submodule(name), device)
            fill(fresh, resolved, tensors(), kept, lambda done, total: None)
            check_finite(fresh, resolved.model_path)
            for name in names:
                made = fresh.get_submodule(name)
                fresh.prepare_weights(made)
                _copy(made, model.get_submodule(name), name)
                fresh.set_submodule(name, nn.Module())


def _passes(fresh: Decoder, pass_bytes: int, *, only_experts: bool) -> Iterator[list[str]]:
    """Names of modules, in parts of so many bytes."""
    layers = [f"layers.{number}" for number in range(len(fresh.layers))]
    names = layers + [name for name, _ in fresh.named_children() if name != "layers"]
    if only_experts:
        experts = {id(mixture.experts) for mixture in fresh.mixtures()}
        names = [name for name, module in fresh.named_modules() if id(module) in experts]
    part: list[str] = []
    size = 0
    for name in names:
        module = fresh.get_submodule(name)
        own = sum(parameter.nbytes for parameter in module.parameters())
        if part and size + own > pass_bytes:
            yield part
            part, size = [], 0
        part.append(name)
        size += own
    yield part


def _copy(made: nn.Module, running: nn.Module, name: str) -> None:
    for path, tensor in tensors_by_path(made):
        into = held_by(running, path)
        if not isinstance(into, Tensor) or (into.shape, into.dtype) != (tensor.shape, tensor.dtype):
            raise ProcessFatal(f"{name}.{'.'.join(map(str, path))}: it has another form than in the running model")
        into.copy_(tensor)
