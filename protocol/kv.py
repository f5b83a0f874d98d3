"""KV groups: which keys and values a layer needs, and how layers share one pool of pages of equal bytes. Pure.

A *spec* says what a layer's attention can still see. Layers of equal spec are packed into *groups* of equal size, padded where they
do not divide. A *page* holds `block_size` tokens of one group; all pages have equal bytes, so that one pool serves all groups, and
memory flows between them. Layer j of every group lives in tensor j; a page's number is its place in every tensor. A request has one
block table per group. A model with one spec has one group with all its layers. Made by the workers, told to the scheduler.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import ClassVar

from msgspec import Struct

from meshlm.protocol.model import ModelSpec

GOOD_ENOUGH = 1.05  # times the least memory: with that, the fewest groups


class KeepsAll(Struct, frozen=True):
    """A token sees all tokens before it: every block is kept while a request runs."""

    keeps_all: ClassVar[bool] = True

    def first_needed(self, block_size: int, num_computed: int) -> int:
        """The first block that the token at position `num_computed`, or any after it, can see."""
        return 0

    def num_held(self, block_size: int, num_tokens: int, step_tokens: int = 1) -> int:
        """Blocks of one group that a request of `num_tokens` holds at most, where a step computes up to `step_tokens` of it."""
        return -(-num_tokens // block_size)


class FullAttention(KeepsAll, frozen=True, tag="full"):
    """Keys and values of all tokens."""


class SlidingWindow(Struct, frozen=True, tag="sliding"):
    """A token sees itself and the `window` - 1 tokens before it: blocks outside every window are freed while a request runs."""

    window: int
    keeps_all: ClassVar[bool] = False

    def first_needed(self, block_size: int, num_computed: int) -> int:
        """See KeepsAll."""
        unseen = num_computed - self.window + 1
        return unseen // block_size if unseen > 0 else 0

    def num_held(self, block_size: int, num_tokens: int, step_tokens: int = 1) -> int:
        """See KeepsAll."""
        seen = -(-(self.window - 1 + step_tokens) // block_size) + 1
        return min(-(-num_tokens // block_size), seen)


class Latent(KeepsAll, frozen=True, tag="latent"):
    """One line of numbers of each token: what keys and values are projected up from, and the rotated key that all heads share."""

    rank: int
    rotary: int


class EncoderOnly(KeepsAll, frozen=True, tag="encoder"):
    """Tokens see one another within the step that computes their whole prompt, and nothing of them is kept."""

    def num_held(self, block_size: int, num_tokens: int, step_tokens: int = 1) -> int:
        """See KeepsAll."""
        return 0


KVSpec = FullAttention | SlidingWindow | Latent | EncoderOnly


class KVGroup(Struct, frozen=True):
    """One block table of a request, and the layers that use it."""

    spec: KVSpec
    layers: tuple[int, ...]
    block_size: int
    page_bytes: int


def spec_of_layers(model: ModelSpec) -> list[KVSpec]:
    """The KVSpec of each layer: what its attention sees."""
    if model.encoder_only:
        return [EncoderOnly()] * model.num_hidden_layers
    if model.mla is not None:
        return [Latent(model.mla.kv_lora_rank, model.mla.qk_rope_head_dim)] * model.num_hidden_layers
    sliding = model.sliding_layers or (model.sliding_window > 0,) * model.num_hidden_layers
    return [SlidingWindow(model.sliding_window) if slides else FullAttention() for slides in sliding]


def make_groups(
    specs: Sequence[KVSpec], block_size: int, layer_bytes: int, max_model_len: int, first_layer: int = 0
) -> tuple[KVGroup, ...]:
    """Groups of these layers (numbered from `first_layer`), equal specs side by side, for requests of up to `max_model_len` tokens.

    `layer_bytes`: of one token's keys and values in one layer. The number of layers a group is the one with the fewest groups whose
    longest request takes little more than the least memory; where windows save next to nothing, there is one group that keeps all.
    """
    layers: dict[KVSpec, list[int]] = {}
    for layer, spec in sorted(enumerate(specs, first_layer), key=lambda pair: not pair[1].keeps_all):
        layers.setdefault(spec, []).append(layer)  # what keeps all comes first

    def cost(size: int) -> int:
        return size * sum(
            -(-len(some) // size) * spec.num_held(block_size, max_model_len) for spec, some in layers.items()
        )

    sizes = range(1, max(map(len, layers.values())) + 1)
    least = min(map(cost, sizes))
    every = list(range(first_layer, first_layer + len(specs)))
    everything = next((spec for spec in layers if spec.keeps_all), FullAttention())
    if len(every) * everything.num_held(block_size, max_model_len) <= GOOD_ENOUGH * least:
        layers, size = {everything: every}, len(every)
    else:
        size = max(size for size in sizes if cost(size) <= GOOD_ENOUGH * least)
    groups = []
    for spec, some in layers.items():
        count = -(-len(some) // size)
        # Every count-th layer, not a run of them: so each stage of a pipeline has about the same share of each group.
        groups += [
            KVGroup(spec, tuple(some[n::count]), block_size, size * block_size * layer_bytes) for n in range(count)
        ]
    return tuple(groups)


def pages_of(specs: Sequence[KVSpec], block_size: int, num_tokens: int, step_tokens: int = 1) -> int:
    """Pages that a request of `num_tokens` holds at most; `specs`: one per group."""
    return sum(spec.num_held(block_size, num_tokens, step_tokens) for spec in specs)


def step_tokens(max_num_batched_tokens: int, async_depth: int, max_drafts: int) -> int:
    """Tokens of one request between the first that is not known to be computed and the last that has a block, at most."""
    return max_num_batched_tokens + (1 + async_depth) * (1 + max_drafts)


def longest_request(
    specs: Sequence[KVSpec], block_size: int, num_pages: int, max_len: int, step_tokens: int = 1
) -> int:
    """The most tokens below `max_len` of one request that fits into so many pages."""

    def is_too_long(num_tokens: int) -> bool:
        return pages_of(specs, block_size, num_tokens, step_tokens) > num_pages

    return bisect_left(range(1, max_len), True, key=is_too_long)


def tokens_held(groups: Sequence[KVGroup], memory: int, num_tokens: int) -> int:
    """Tokens of requests of `num_tokens` each that decode side by side within `memory` bytes."""
    pages = memory // groups[0].page_bytes
    held = pages_of([group.spec for group in groups], groups[0].block_size, num_tokens)
    return pages * num_tokens // held if held else 0
