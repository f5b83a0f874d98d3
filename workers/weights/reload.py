"""Reads weights again into a model that computes: new values in the tensors that are there, so CUDA graphs and fused kernels stay.

The model is made once more, some modules at a time: their tensors are loaded and brought into the form of their formats as at the
start, and are copied over those of the running model. So no format knows of it, and only a few layers need memory twice.

Tensors of a model are more than its parameters and buffers: after loading a `WeightFormat` and experts bring weights, scales, zero
points and tables into forms of their own, which they keep in themselves. What belongs to others is not the model's: the communicator,
the ops' workspaces, peers' memory.
"""

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any, Protocol, cast

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from meshlm.protocol.config import MeshConfig, ModelConfig, Resolved
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.runtime.model_files.model_files import resolve_model
from meshlm.workers.formats.format import WeightFormat
from meshlm.workers.layers.ops import AttentionShape, LatentShape
from meshlm.workers.layers.summing_ops import SummingOps
from meshlm.workers.models.decoder import Decoder, DecoderLayer
from meshlm.workers.moe.fused_moe import FusedMoE
from meshlm.workers.weights.check import check_finite
from meshlm.workers.weights.load import DTYPES, default_dtype, fill, make_tensors, planned
from meshlm.workers.weights.weights_plan import WeightsPlan

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


PASS_BYTES = 2 << 30
"""Modules of so many bytes are loaded at a time; each time all names of the files are gone through."""


class ReloadableEngine(Protocol):
    """The part of an engine that this needs. One of another kind lacks it, and cannot reload."""

    config: MeshConfig
    resolved: Resolved
    device: torch.device
    model: Decoder
    weights_plan: WeightsPlan
    draft_model: Decoder | None
    draft_plan: WeightsPlan | None


def of_engine(engine: object, *, only_verify: bool) -> str:
    """Reads an engine's weights again, or only finds out whether that can be: why not. ProcessFatal once tensors have been changed."""
    if not isinstance(getattr(engine, "model", None), Decoder):
        return "reload_weights: this worker has no weights that could be read again"
    made = cast("ReloadableEngine", engine)
    if only_verify and (why := _refusal(made)):
        return f"reload_weights: {why}"
    models, seed = [(made.model, made.resolved, made.weights_plan)], made.config.model.seed or 0
    if made.draft_model is not None and made.resolved.drafter is not None and made.draft_plan is not None:
        models.append((made.draft_model, made.resolved.drafter, made.draft_plan))
    try:
        for model, resolved, plan in models:
            reload_weights(model, resolved, made.device, seed, plan, only_verify=only_verify)
    except (ProcessFatal, torch.OutOfMemoryError) as error:
        if not only_verify:  # some tensors are of the new files: this worker ends, and its rank loads them all
            raise
        return f"reload_weights: {error}"
    return ""


def _refusal(engine: ReloadableEngine) -> str:
    """Why the files are not those of the model that runs, or cannot be read again; "": they may be."""
    resolved, asked, spec = engine.resolved, engine.config.model, engine.resolved.spec
    if resolved.load_format == "sharded_state" or resolved.weights_url or spec.transformers is not None:
        return "weights are read again from safetensors, .gguf and .bin files on a disk, and not with --model-impl transformers"
    if resolved.pooling is not None or spec.encoder_only or spec.audio_encoder is not None:
        return "it is there for models that give text"
    if any(not parameter.untyped_storage().size() for parameter in engine.model.parameters()):
        return "the worker is asleep; wake_up comes first"
    try:
        flags = ModelConfig(
            model=resolved.model_path,
            load_format=resolved.load_format,
            hf_overrides=asked.hf_overrides,
            model_impl=asked.model_impl,
        )
        found = resolve_model(flags).spec
    except ModelFilesError as error:
        return str(error)
    if spec.quantization is not None and any(scheme.online for scheme in spec.quantization.schemes):
        found = replace(found, quantization=spec.quantization)
    changed = [name for name in spec.__struct_fields__ if getattr(found, name) != getattr(spec, name)]
    return (
        f"{resolved.model_path}: its files describe another model than at the start ({', '.join(changed)})"
        if changed
        else ""
    )


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
