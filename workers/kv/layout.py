"""Lays out where the layers of one worker keep what attention reads of earlier tokens: which block table of a request, and which
tensor.

The groups are those of the whole model (protocol/kv.py), so all workers of a scheduler have the same ones. A page is the same place
in every tensor: layer j of each group, counted among this worker's own, lives in tensor j. Made once, by the engine.
"""

from math import prod
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from meshlm.protocol.kv import (
    EncoderOnly,
    FullAttention,
    KVSpec,
    Latent,
    SlidingWindow,
    make_groups,
    pages_of,
    spec_of_layers,
)
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import LayerCache
from meshlm.workers.distributed.shard import WHOLE, Shard


def cache_shape(spec: KVSpec, model: ModelSpec, num_pages: int, block_size: int) -> tuple[int, ...]:
    """The shape of the tensor of one layer. `model` is this worker's part of the model."""
    match spec:
        case FullAttention() | SlidingWindow() | EncoderOnly():
            return 2, num_pages, block_size, model.num_key_value_heads, model.head_dim
        case Latent(rank, rotary):
            return num_pages, block_size, 1, rank + rotary
    assert_never(spec)


def layer_cache(spec: KVSpec, tensor: Tensor, group: int, scales: tuple[float, float]) -> LayerCache:
    """The view of its tensor that a layer gets. scales are those of keys and values in an FP8 cache."""
    match spec:
        case FullAttention() | SlidingWindow() | EncoderOnly():
            return LayerCache(tensor[0], tensor[1], *scales, group)
        case Latent():
            return LayerCache(tensor, tensor, group=group)
    assert_never(spec)


class LayerPlace(NamedTuple):
    """The place of one layer of this worker."""

    group: int
    tensor: int


class KVLayout:
    """The layout of the KV cache of one worker's part of a model, for requests of up to `max_model_len` tokens. dtype: of the cache."""

    def __init__(
        self, model: ModelSpec, block_size: int, max_model_len: int, dtype: torch.dtype, shard: Shard = WHOLE
    ) -> None:
        """model: the whole of it."""
        self.block_size, self.dtype, self._local = block_size, dtype, shard.local(model)
        kinds = spec_of_layers(model)
        shapes = {cache_shape(kind, self._local, 1, 1) for kind in kinds}
        assert len(shapes) == 1, "layers whose tokens take different shapes cannot share a page"
        layer_bytes = prod(shapes.pop()) * dtype.itemsize
        groups = make_groups(kinds, block_size, layer_bytes, max_model_len)
        self.specs = tuple(group.spec for group in groups)
        own = shard.layers(model.num_hidden_layers)
        place_of = {
            layer: LayerPlace(nth, tensor)
            for nth, group in enumerate(groups)
            for tensor, layer in enumerate(layer for layer in group.layers if layer in own)
        }
        self.places = [place_of[layer] for layer in own]
        self.num_tensors = 1 + max(place.tensor for place in self.places)
        self.page_bytes = self.num_tensors * block_size * layer_bytes

    def caches(self, tensors: list[Tensor], scales: list[tuple[float, float]]) -> list[LayerCache]:
        """The view of these tensors, which have `shape`, that each layer gets. scales stand by layer."""
        return [
            layer_cache(self.specs[place.group], tensors[place.tensor], place.group, own)
            for place, own in zip(self.places, scales, strict=True)
        ]

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """The shape of each tensor."""
        return cache_shape(self.specs[0], self._local, num_pages, self.block_size)

    def tokens_held(self, num_pages: int, num_tokens: int) -> int:
        """Tokens of requests of `num_tokens` each that decode side by side in so many pages."""
        held = pages_of(self.specs, self.block_size, num_tokens)
        return num_pages * num_tokens // held if held else 0
