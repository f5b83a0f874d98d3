"""Gives the layers of a model that rotate otherwise than the model their own table of cosines and sines."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from meshlm.protocol.model import ModelSpec
from meshlm.workers.layers.rope import rope_table


class Rotating(Protocol):
    """The part of an attention layer that this is about."""

    window: int
    rotates: bool
    table: Tensor | None


def use_tables(attentions: Iterable[Rotating], spec: ModelSpec, max_len: int, rope: Tensor) -> None:
    """Layers that slide may have a rotation of their own; those without positions turn by an angle of zero."""
    local, sliding, every = spec.sliding_rope, None, list(attentions)
    if local is not None:
        sliding = rope_table(spec, max_len, local).to(device=rope.device)
    still = None if all(one.rotates for one in every) else torch.ones_like(rope)
    if still is not None:
        still[:, still.shape[1] // 2 :] = 0
    for attention in every:
        attention.table = still if not attention.rotates else sliding if attention.window else None
