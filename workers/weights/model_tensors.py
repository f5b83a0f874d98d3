"""Every tensor that a loaded model keeps, wherever: for whoever must have them all (sleep). Called by the engine.

Parameters and buffers are a part of them. After loading a `WeightFormat` and experts bring weights, scales, zero points and tables into
forms of their own, which they keep in themselves; a model keeps what it computes once. What belongs to others is not the model's: the
communicator, the ops' workspaces, peers' memory.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from meshlm.workers.layers.linear import Linear
from meshlm.workers.layers.ops import AttentionShape
from meshlm.workers.moe.fused_moe import FusedMoE

_OWN = ("meshlm.workers.formats", "meshlm.workers.moe.experts", "meshlm.workers.models", "meshlm.kernels")
"""Packages whose objects keep tensors of the model, where a module holds such an object."""


def tensors_of(model: nn.Module) -> list[Tensor]:
    """Each of them once."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    left: list[Any] = [model]
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            found[id(one)] = one
        elif id(one) not in seen:
            seen.add(id(one))
            left += _inside(one)
    return list(found.values())


def _inside(one: Any) -> Iterator[Any]:
    """What an object holds that may be the model's, or hold some of it."""
    if isinstance(one, Mapping):
        yield from one.values()
    elif isinstance(one, list | tuple | set | frozenset):
        yield from one
    elif isinstance(one, FusedMoE):
        yield one.experts
    elif isinstance(one, nn.Module | AttentionShape) or type(one).__module__.startswith(_OWN):
        yield from _attributes(one)
        if isinstance(one, Linear):  # a plug-in's method is of another package
            yield from _attributes(one.format)


def _attributes(one: object) -> Iterator[Any]:
    yield from getattr(one, "__dict__", {}).values()
    yield from (getattr(one, name) for name in getattr(type(one), "__slots__", ()) if hasattr(one, name))
