"""Reads weights again into a model that computes: new values in the tensors that are there, so CUDA graphs and fused kernels stay.

The model is made once more, some modules at a time: their tensors are loaded and brought into the form of their formats as at the
start, and are copied over those of the running model. So no format knows of it, and only a few layers need memory twice.

Tensors of a model are more than its parameters and buffers: after loading a `WeightFormat` and experts bring weights, scales, zero
points and tables into forms of their own, which they keep in themselves. What belongs to others is not the model's: the communicator,
the ops' workspaces, peers' memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from meshlm.protocol.config import MeshConfig, Resolved
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.formats.format import WeightFormat
from meshlm.workers.layers.ops import AttentionShape, LatentShape
from meshlm.workers.layers.summing_ops import SummingOps
from meshlm.workers.models.decoder import Decoder, DecoderLayer
from meshlm.workers.moe.fused_moe import FusedMoE
from meshlm.workers.weights.check import check_finite
from meshlm.workers.weights.load import DTYPES, default_dtype, fill, make_tensors, planned
from meshlm.workers.weights.offload import is_offloaded, slots_of
from meshlm.workers.weights.weights_plan import WeightsPlan

if TYPE_CHECKING:
    from meshlm.workers.rows.extras.extra import RowExtras

_OWN = ("meshlm.workers.formats", "meshlm.workers.moe.experts", "meshlm.workers.models", "meshlm.kernels")
"""Packages whose objects keep tensors of the model, where a module holds such an object."""


Path = tuple[str | int, ...]


def tensors_of(model: nn.Module) -> list[Tensor]:
    return list({id(tensor): tensor for _, tensor in tensors_by_path(model)}.values())


def tensors_by_path(model: nn.Module) -> Iterator[tuple[Path, Tensor]]:
    """All of them, with the way that leads to each: names of attributes, keys and numbers."""
    seen: set[int] = set()
    left: list[tuple[Path, Any]] = [((), model)]
    while left:
        path, one = left.pop()
        if isinstance(one, Tensor):
            yield path, one
        elif id(one) not in seen:
            seen.add(id(one))
            left += [((*path, key), inside) for key, inside in _inside(one)]


def held_by(model: nn.Module, path: Path) -> Any:
    """The object that the way leads to; None: there is nothing."""
    one: Any = model
    for key in path:
        one = dict(_inside(one)).get(key)
    return one


def _inside(one: Any) -> Iterator[tuple[str | int, Any]]:
    """The parts of an object that may be the model's, or hold some of it."""
    if isinstance(one, Mapping):
        yield from one.items()
    elif isinstance(one, list | tuple | set | frozenset):
        yield from enumerate(one)
    elif isinstance(one, FusedMoE):
        yield "experts", one.experts
    elif isinstance(one, FunctionType) and one.__module__.startswith("meshlm.workers.layers"):
        yield from zip(one.__code__.co_freevars, (cell.cell_contents for cell in one.__closure__ or ()), strict=True)
    elif (
        isinstance(one, nn.Module | AttentionShape | LatentShape)
        or type(one).__module__.startswith(_OWN)
        or isinstance(one, WeightFormat)
    ):
        yield from _attributes(one)


def _attributes(one: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(one, "__dict__", {}).items()
    slots = (name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ()))
    yield from ((name, getattr(one, name)) for name in slots if hasattr(one, name))


SUM_WORDS = 1 << 22  # that are summed at a time
PASS_BYTES = 2 << 30
"""Modules of so many bytes are loaded at a time; each time all names of the files are gone through."""


class ReloadableEngine(Protocol):
    """The part of an engine that this needs."""

    config: MeshConfig
    resolved: Resolved
    device: torch.device
    model: Decoder
    weights_plan: WeightsPlan
    draft_model: Decoder | None
    draft_plan: WeightsPlan | None
    extras: "RowExtras[Tensor]"


def why_not(engine: ReloadableEngine, resolved: Resolved) -> str:
    """Why the engine cannot have these weights, all of which are read; "": it can. Nothing changes."""
    if resolved.spec.transformers is not None:
        return "weights are not read again with --model-impl transformers"
    if resolved.pooling is not None or resolved.spec.encoder_only or resolved.spec.audio_encoder is not None:
        return "weights are read again of models that give text"
    if is_offloaded(engine.model):
        return "weights that stay on the host (--cpu-offload-gb) are not replaced"
    if any(not parameter.untyped_storage().size() for parameter in engine.model.parameters()):
        return "the worker is asleep; wake_up of its weights comes first"
    try:
        load(engine, resolved, only_verify=True)
    except (ProcessFatal, torch.OutOfMemoryError) as error:
        return str(error)
    return ""


def load(engine: ReloadableEngine, resolved: Resolved, *, only_verify: bool = False) -> None:
    """Reads these weights into the engine's models. ProcessFatal; then some of their tensors may have new values already."""
    models, seed = [(engine.model, resolved, engine.weights_plan)], engine.config.model.seed or 0
    if engine.draft_model is not None and resolved.drafter is not None and engine.draft_plan is not None:
        models.append((engine.draft_model, resolved.drafter, engine.draft_plan))
    for model, found, plan in models:
        reload_weights(model, found, engine.device, seed, plan, only_verify=only_verify)
    if not only_verify:
        engine.resolved = resolved
        engine.extras.weights_changed()


def load_experts(engine: ReloadableEngine, seed: int) -> None:
    """Reads this rank's own experts again, into the slots that they had at the start. ProcessFatal."""
    found = engine.resolved
    reload_weights(engine.model, found, engine.device, seed, engine.weights_plan, only_experts=True)


def sum_of(models: Iterable[nn.Module]) -> str:
    """A sum over all bytes of the weights as they lie in memory, for every place another factor: equal weights have equal sums."""
    total = 0
    for model in models:
        slots = slots_of(model)
        for tensor in tensors_of(model):
            if tensor.is_meta or tensor.untyped_storage().data_ptr() in slots:  # its values are packed, in another one
                continue
            data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            words = data[: len(data) // 4 * 4].view(torch.int32)
            rest = int(data[len(data) // 4 * 4 :].sum())
            own = 0
            for begin in range(0, len(words), SUM_WORDS):
                part = words[begin : begin + SUM_WORDS].long()
                places = torch.arange(1, len(part) + 1, device=part.device)
                own = (own * 1_000_003 + int(((part * places) & ((1 << 40) - 1)).sum())) % (1 << 61)
            total = (total * 1_000_003 + own + rest) % (1 << 61)
    return f"{total:016x}"


def reload_weights(
    model: Decoder,
    resolved: Resolved,
    device: torch.device,
    seed: int,
    plan: WeightsPlan | None = None,
    *,
    only_experts: bool = False,
    only_verify: bool = False,
    pass_bytes: int = PASS_BYTES,
) -> None:
    """After `load_model` with the same arguments: this shard's weights as the files have them now. only_experts: this rank's own, into
    the slots that they had at the start. only_verify: all but the last step, which changes the running model.

    ProcessFatal where they cannot be read, or not into this model; then some of its tensors may have new values already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # of steps that compute with the tensors
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
                for into, tensor in _pairs(made, model.get_submodule(name), name):
                    if not only_verify:
                        into.copy_(tensor)
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


def _pairs(made: nn.Module, running: nn.Module, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor of the running module, and what is to be in it. ProcessFatal."""
    if isinstance(made, DecoderLayer) and isinstance(running, DecoderLayer):
        scales = [getattr(layer.attention, "kv_scale", None) for layer in (made, running)]
        if scales[0] != scales[1]:
            raise ProcessFatal(f"{name}: its scales of an FP8 KV cache are others than at the start")
    for path, tensor in tensors_by_path(made):
        into = held_by(running, path)
        if not isinstance(into, Tensor) or (into.shape, into.dtype) != (tensor.shape, tensor.dtype):
            raise ProcessFatal(f"{name}.{'.'.join(map(str, path))}: it has another form than in the running model")
        yield into, tensor
