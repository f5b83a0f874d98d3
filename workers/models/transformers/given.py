"""The head of a model of transformers alone: logits of states that were computed before, by the model's own code."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


class _Output(tuple[Tensor | None, ...]):
    """What a head may ask of its layers: the states, and nothing else."""

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
    """From here on the model is its head."""
    setattr(model, model.base_model_prefix, GivenStates())


def logits_of(model: Any, states: Tensor) -> Tensor:
    """[l, hidden] -> [l, vocab] by a model that `give` has changed."""
    found: Tensor = model(inputs_embeds=states[None], use_cache=False).logits[0]
    return found


@contextmanager
def given_states(model: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """Inside, the model is its head."""
    layers = model.base_model
    give(model)
    try:
        yield lambda states: logits_of(model, states)
    finally:
        setattr(model, model.base_model_prefix, layers)
