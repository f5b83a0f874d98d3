"""Every tensor that a loaded model keeps, wherever: for whoever must have them all (sleep). Called by the engine.

Parameters and buffers are a part of them. After loading a `WeightFormat` and experts bring weights, scales, zero points and tables into
forms of their own, which they keep in themselves; a model keeps what it computes once. What belongs to others is not the model's: the
communicator, the ops' workspaces, peers' memory.
"""

from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from meshlm.workers.formats.format import WeightFormat
from meshlm.workers.layers.ops import AttentionShape, LatentShape
from meshlm.workers.moe.fused_moe import FusedMoE

_OWN = ("meshlm.workers.formats", "meshlm.workers.moe.experts", "meshlm.workers.models", "meshlm.kernels")
"""Packages whose objects keep tensors of the model, where a module holds such an object."""


Path = tuple[str | int, ...]


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Each of them once."""
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
    """What the way leads to; None: there is nothing."""
    one: Any = model
    for key in path:
        one = dict(_inside(one)).get(key)
    return one


def _inside(one: Any) -> Iterator[tuple[str | int, Any]]:
    """What an object holds that may be the model's, or hold some of it."""
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
