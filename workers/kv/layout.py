"""Lays out where the layers of one worker keep what they need of earlier tokens: which block table of a request, and which tensor.

The groups are those of the whole model (protocol/kv.py), so all workers of a scheduler have the same ones. A page is the same place
in every tensor: layer j of each group, counted among this worker's own, lives in tensor j. Made once, by the engine.

Where a group's layers take a part of the bytes that a tensor has for a token, several of them share it: a page is so many virtual
pages there, of which each layer has one. The group's block tables count virtual pages on the device (`shares`), and a layer's view
begins at its own first one, so that attention knows nothing of it.

Recurrent states share the pages: a tensor is two halves of bytes then, which attention takes as keys and values, and a state as two
halves of its heads and channels. A block is made as long as a state is large.
"""

from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.protocol import kv
from meshlm.protocol.config.engine import CacheConfig
from meshlm.protocol.layers import LayerSpec, StateSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.batch import CrossCache, LayerCache, StateCache
from meshlm.workers.distributed.shard import WHOLE, Shard
from meshlm.workers.kv_capacity import CHECKPOINT_TOKENS, state_spec

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ALIGN = 16  # bytes; numbers of any dtype may begin there


class StateLayout(NamedTuple):
    """One state in the two halves of a page: heads, then channels of the convolution."""

    state: StateSpec  # of this worker
    ssm: torch.dtype
    conv: torch.dtype

    @property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int]]:
        """The shapes of the states of the heads and of the channels in a half."""
        state = self.state
        heads = (-(-state.num_heads // 2), state.head_dim, state.state_size)
        return heads, (-(-state.conv_dim // 2), state.conv_kernel - 1)

    @property
    def conv_at(self) -> int:
        """The byte of a half where the channels begin."""
        return _aligned(prod(self.shapes[0]) * self.ssm.itemsize)

    @property
    def half_bytes(self) -> int:
        return _aligned(self.conv_at + prod(self.shapes[1]) * self.conv.itemsize)

    def view(self, halves: Tensor, group: int) -> StateCache:
        """halves: bytes [2, pages, at least half_bytes]."""
        heads, channels = self.shapes
        ssm = halves[..., : prod(heads) * self.ssm.itemsize].view(self.ssm)
        conv = halves[..., self.conv_at : self.conv_at + prod(channels) * self.conv.itemsize].view(self.conv)
        return StateCache(ssm.unflatten(-1, heads), conv.unflatten(-1, channels), group)


def _aligned(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def _state_layout(state: StateSpec, cache: CacheConfig, dtype: torch.dtype) -> StateLayout:
    """dtype: of the model."""
    conv = dtype if cache.mamba_cache_dtype == "auto" else DTYPES[cache.mamba_cache_dtype]
    wanted: str = cache.mamba_ssm_cache_dtype
    if wanted == "auto" and cache.mamba_cache_dtype == "auto":
        wanted = state.dtype
    return StateLayout(state, conv if wanted == "auto" else DTYPES[wanted], conv)


class LayerPlace(NamedTuple):
    """The place of one cache of this worker."""

    layer: int  # counted among the worker's own
    group: int
    tensor: int
    nth: int = 0  # among the layers of its group that share the tensor


class KVLayout:
    """The layout of the KV cache of one worker's part of a model, for requests of up to `max_model_len` tokens. dtype: of the cache."""

    def __init__(
        self,
        model: ModelSpec,
        block_size: int,
        max_model_len: int,
        dtype: torch.dtype,
        shard: Shard = WHOLE,
        cache: CacheConfig | None = None,
        model_dtype: torch.dtype | None = None,
    ) -> None:
        """model: the whole of it. cache, model_dtype: what states need to know."""
        self.dtype, self._model, self._local = dtype, model, shard.local(model)
        if model.audio_encoder is not None:
            length = model.audio_encoder.max_source_positions
            block_size = kv.block_size_with_cross_attention(block_size, model.num_hidden_layers, length, max_model_len)
        shapes: dict[kv.KVSpec, tuple[int, ...]] = {
            kind: self._shape(shard.local_layer(model.layers[layer]), kind, 1, block_size)
            for layer, kind in kv.caches_of(model)
            if kind.fills != "state"
        }
        of_kind = {kind: prod(shape) * dtype.itemsize // block_size for kind, shape in shapes.items()}
        layer_bytes, _ = kv.shares(of_kind)
        self._halves = min((shape[0] for shape in shapes.values()), default=2)
        self.states: StateLayout | None = None
        cache = cache or CacheConfig()
        if model.state is not None:
            assert len(set(of_kind.values())) <= 1, "a state shares pages with caches of one size"
            self.states = _state_layout(shard.local_state(model.state), cache, model_dtype or dtype)
            if not layer_bytes:  # blocks are for checkpoints alone
                block_size = max(block_size, cache.mamba_block_size or CHECKPOINT_TOKENS)
            block_size = kv.block_size_with_states(block_size, layer_bytes, 2 * self.states.half_bytes)
        self.block_size = block_size
        self._half_bytes = max(self.states.half_bytes if self.states else 0, layer_bytes * block_size // self._halves)
        found = kv.caches_of(model, state_spec(cache, block_size)) if self.states else kv.caches_of(model)
        every = {kind: of_kind.get(kind, layer_bytes) for _, kind in found}
        groups = kv.make_groups([kind for _, kind in found], block_size, every, max_model_len)
        self.specs = tuple(group.spec for group in groups)
        self.shares = tuple(group.layers_per_tensor for group in groups)
        own = shard.layers(model.num_hidden_layers)
        self.num_layers = len(own)
        self.places = [
            LayerPlace(layer - own.start, nth, *divmod(place, group.layers_per_tensor))
            for nth, group in enumerate(groups)
            for place, layer in enumerate(found[one][0] for one in group.layers if found[one][0] in own)
        ]
        self.num_tensors = 1 + max((place.tensor for place in self.places), default=0)
        self.page_bytes = self.num_tensors * self._halves * self._half_bytes
        self.waste = 0.0  # of a request's pages, in a model with states or an encoder
        if self.states:
            size = max(len(group.layers) for group in groups)
            used = {kind: 2 * self.states.half_bytes if kind.carried else block_size * layer_bytes for _, kind in found}
            self.waste = kv.waste(groups, used, size * 2 * self._half_bytes, max_model_len)
        elif model.audio_encoder is not None:
            token = min(of_kind.values())
            used = {kind: token * kind.tokens_of_page(block_size) for kind in of_kind}
            self.waste = kv.waste(groups, used, self.page_bytes, max_model_len)

    @property
    def heads(self) -> tuple[int, int]:
        """The key-value heads of every layer of the whole model, and the bytes of one in a token's row, where every page is rows of
        such heads; else 0 twice: layers differ, or keep states, or share pages."""
        caches = [(self._model.layers[layer], spec) for layer, spec in kv.caches_of(self._model)]
        if any(spec.fills != "attention" for _, spec in caches):
            return 0, 0
        found = {self._shape(layer, spec, 1, self.block_size)[-2:] for layer, spec in caches}
        if len(found) != 1 or set(self.shares) != {1}:
            return 0, 0
        ((count, size),) = found
        return count, size * self.dtype.itemsize

    @staticmethod
    def _shape(layer: LayerSpec, spec: kv.KVSpec, num_pages: int, block_size: int) -> tuple[int, ...]:
        assert layer.attention is not None
        return spec.shape(layer.attention.num_key_value_heads, layer.attention.head_dim, num_pages, block_size)

    @property
    def state_groups(self) -> list[int]:
        return [group for group, spec in enumerate(self.specs) if spec.fills == "state"]

    def shape(self, num_pages: int) -> tuple[int, int, int]:
        """The shape of each tensor, of bytes: halves, pages, bytes of a half of a page."""
        return self._halves, num_pages, self._half_bytes

    def caches(self, tensors: list[Tensor], scales: list[tuple[float, float]]) -> list[LayerCache]:
        """The view of these tensors (uint8), which have `shape`, that each layer gets. scales stand by layer."""
        nothing = torch.empty(0, dtype=self.dtype)
        found: list[LayerCache] = [LayerCache(nothing, nothing)] * self.num_layers
        for place in self.places:
            spec, tensor, at = self.specs[place.group], tensors[place.tensor], found[place.layer]
            if spec.fills == "state":
                assert self.states is not None
                found[place.layer] = replace(at, state=self.states.view(tensor, place.group))
                continue
            share = self.shares[place.group]
            shape = self._shape(self._local.layers[place.layer], spec, tensor.shape[1] * share, self.block_size)
            pages = tensor.view(self.dtype).view(shape)
            keys, values = pages[0, place.nth :], pages[-1, place.nth :]
            if spec.fills == "cross":
                found[place.layer] = replace(at, cross=CrossCache(keys, values, place.group, spec.tokens_of_page(0)))
            else:
                k_scale, v_scale = scales[place.layer]
                found[place.layer] = replace(
                    at, keys=keys, values=values, k_scale=k_scale, v_scale=v_scale, group=place.group
                )
        sources = [layer.cache_of for layer in self._local.layers]
        return [cache if source is None else found[source] for cache, source in zip(found, sources, strict=True)]

    def tokens_held(self, num_pages: int, num_tokens: int) -> int:
        """Tokens of requests of `num_tokens` each that decode side by side in so many pages."""
        held = kv.pages_of(self.specs, self.block_size, num_tokens)
        return num_pages * num_tokens // held if held else 0
