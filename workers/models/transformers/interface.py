"""The functions that transformers' models call for attention: one serves, the other looks at what a layer asks for.

A layer's module has what it needs in an attribute of its own (`LAYER`); nothing about a step is global. While a model serves, no mask
is made, since none is registered under that name; while it is looked at, what would make the mask is handed on instead of one.

The head of a model of transformers alone: logits of states that were computed before, by the model's own code.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

SERVING, LOOKING = "meshlm", "meshlm_looking"
LAYER = "_meshlm_attention"
SINKS = "s_aux"  # a logit of each head that takes part in the sum alone


class Attends(Protocol):
    """The object that a layer's module has as its attribute LAYER."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class MaskFunction:
    """A function that makes a mask: whether the query at one index sees the key at another, for tensors of indices."""

    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # of batch, head, query and key


@dataclass(frozen=True, slots=True)
class Seen:
    """One call of attention, as a model on the meta device made it."""

    module: nn.Module
    query: tuple[int, ...]  # shape [1, heads, t, head_dim]
    key: tuple[int, ...]
    value: tuple[int, ...]
    mask: object
    scaling: float | None
    softcap: float | None
    others: dict[str, Any]  # that were given, and are not None


def _serve(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    attends: Attends = getattr(module, LAYER)
    return attends(query, key, value, scaling, softcap, others.get(SINKS)), None


def _look(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    seen: list[Seen] = getattr(module, LAYER)
    shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
    given = {name: value for name, value in others.items() if value is not None}
    seen.append(Seen(module, *shapes, attention_mask, scaling, softcap, given))
    out = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return torch.empty(out, dtype=query.dtype, device=query.device), None


def _mask(*_: Any, mask_function: Callable[..., Tensor], **__: Any) -> MaskFunction:
    return MaskFunction(mask_function)


def register() -> None:
    """Let models name these functions as their `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(SERVING, _serve)
    AttentionInterface.register(LOOKING, _look)
    AttentionMaskInterface.register(LOOKING, _mask)


class _Output(tuple[Tensor | None, ...]):
    """The output that a head may ask of its layers: the states, and nothing else."""

    __slots__ = ()

    @property
    def last_hidden_state(self) -> Tensor | None:
        return self[0]

    def __getattr__(self, name: str) -> None:
        """Routers' logits, attention weights and the like, which no head needs."""


class GivenStates(nn.Module):
    """It stands in the place of a model's layers, and gives the states that it gets: a head may scale or cap its logits as it likes."""

    @property
    def decoder(self) -> "GivenStates":
        """Some models ask a part of their layers."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor | None = None, **__: Any) -> Any:
        return _Output((inputs_embeds,))


def give(model: Any) -> None:
    setattr(model, model.base_model_prefix, GivenStates())


def logits_of(model: Any, states: Tensor) -> Tensor:
    """[l, hidden] -> [l, vocab] by a model that `give` has changed."""
    found: Tensor = model(inputs_embeds=states[None], use_cache=False).logits[0]
    return found


@contextmanager
def given_states(model: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    layers = model.base_model
    give(model)
    try:
        yield lambda states: logits_of(model, states)
    finally:
        setattr(model, model.base_model_prefix, layers)
