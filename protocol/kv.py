"""KV groups: which keys and values a layer needs, and how layers share one pool of pages of equal bytes. Pure.

A *spec* says what a layer's attention can still see. Layers of equal spec are packed into *groups* of equal size, padded where they
do not divide. A *page* holds `block_size` tokens of one group; all pages have equal bytes, so that one pool serves all groups, and
memory flows between them. Layer j of every group lives in tensor j; a page's number is its place in every tensor. A request has one
block table per group. A model with one spec has one group with all its layers. Made by the workers, told to the scheduler.

Layers of one spec may take fewer bytes a token than those of another. Then a tensor has room for the least common multiple of both,
and several layers of a group share each: `KVGroup.layers_per_tensor`.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import lcm
from typing import ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from meshlm.protocol.layers import Attention
from meshlm.protocol.model import ModelSpec

BLOCK_STEP = 16  # a block that is made longer for a state has a multiple of so many tokens
GOOD_ENOUGH = 1.05  # times the least memory: with that, the fewest groups


class KVPolicy(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a sequence for a layer, in which shape, and when another request may use it. Here: keys and values of all tokens.

    The scheduler and the workers ask the spec, never for its kind: another kind overrides what differs."""

    of_draft: bool = False  # it is of a drafter's layers, whose heads have another shape
    keeps_all: ClassVar[bool] = True  # every block is kept while a request runs
    carried: ClassVar[bool] = False  # one page moves on with the request
    shares_prefix: ClassVar[bool] = True  # equal tokens have equal pages
    fills: ClassVar[Literal["attention", "cross", "state"]] = "attention"  # what of a layer's cache it is
    event_kind: ClassVar[str] = "full_attention"  # vLLM's name of it, in events of the prefix cache

    def first_seen(self, position: int) -> int:
        """The first token that the one at `position` sees; below 0 where it would be before the text."""
        return 0

    def first_needed(self, block_size: int, num_computed: int) -> int:
        """The first block that the token at position `num_computed`, or any after it, can see."""
        return max(0, self.first_seen(num_computed)) // block_size

    def num_held(self, block_size: int, num_tokens: int, step_tokens: int = 1) -> int:
        """Blocks of one group that a request of `num_tokens` holds at most, where a step computes up to `step_tokens` of it."""
        return -(-num_tokens // block_size)

    def fresh_rows(self, block_size: int, begin: int, end: int, num_computed: int) -> Sequence[int]:
        """The rows from `begin` up to `end` of a block table, which the next step adds, that get a page of their own.

        num_computed: the tokens before that step."""
        return range(begin, end)

    def step_end(self, block_size: int, start: int, count: int) -> int:
        """So many of the `count` tokens of a prompt from `start` on that their step ends where a checkpoint is left; all of them where
        there is no such place among them."""
        return count

    def drafts_end(self, block_size: int, num_computed: int) -> int | None:
        """So many tokens of a request, of which `num_computed` are computed, may be computed at most before its block table has a row
        behind them; None: any number."""
        return None

    @property
    def checkpoint_blocks(self) -> int:
        """Blocks from one place of a checkpoint to the next; 0: none are left."""
        return 0

    def tokens_of_page(self, block_size: int) -> int:
        return block_size

    def shape(self, num_heads: int, head_dim: int, num_pages: int, block_size: int) -> tuple[int, ...]:
        """Of one layer's cache on one worker: the first of its halves are the keys, the last the values."""
        return 2, num_pages, block_size, num_heads, head_dim


class FullAttention(KVPolicy, frozen=True, tag="full"):
    """A token sees all tokens before it."""


def _blocks_of_span(span: int, block_size: int, num_tokens: int, step_tokens: int) -> int:
    """Blocks that a request holds whose tokens see at most `span` tokens, themselves among them, as in KVPolicy.num_held."""
    seen = -(-(span - 1 + step_tokens) // block_size) + 1  # the tokens of one step may begin within a block
    return min(-(-num_tokens // block_size), seen)


class SlidingWindow(KVPolicy, frozen=True, tag="sliding"):
    """A token sees itself and the `window` - 1 tokens before it."""

    window: int
    keeps_all: ClassVar[bool] = False  # blocks before it are freed while a request runs
    event_kind: ClassVar[str] = "sliding_window"

    def num_held(self, block_size: int, num_tokens: int, step_tokens: int = 1) -> int:
        return _blocks_of_span(self.window, block_size, num_tokens, step_tokens)

    def first_seen(self, position: int) -> int:
        return position - self.window + 1


class ChunkedAttention(KVPolicy, frozen=True, tag="chunked"):
    """A text is cut into chunks of `chunk` tokens, and a token sees those of its own up to itself."""

    chunk: int
    keeps_all: ClassVar[bool] = False  # blocks before it are freed while a request runs
    event_kind: ClassVar[str] = "chunked_local_attention"

    def num_held(self, block_size: int, num_tokens: int, step_tokens: int = 1) -> int:
        return _blocks_of_span(self.chunk, block_size, num_tokens, step_tokens)

    def first_seen(self, position: int) -> int:
        return position // self.chunk * self.chunk


class Latent(KVPolicy, frozen=True, tag="latent"):
    """One line of numbers of each token: what keys and values are projected up from, the rotated key that all heads share, and where an
    index chooses tokens its key."""

    rank: int
    rotary: int
    index: int = 0
    event_kind: ClassVar[str] = "mla_attention"

    def shape(self, num_heads: int, head_dim: int, num_pages: int, block_size: int) -> tuple[int, ...]:
        """One half, of one head: a line is key and value."""
        return 1, num_pages, block_size, 1, self.rank + self.rotary + self.index


class EncoderOnly(KVPolicy, frozen=True, tag="encoder"):
    """Tokens see one another within the step that computes their whole prompt, and nothing of them is kept."""

    shares_prefix: ClassVar[bool] = False
    event_kind: ClassVar[str] = "encoder_only_attention"

    def num_held(self, block_size: int, num_tokens: int, step_tokens: int = 1) -> int:
        return 0


class CrossAttention(KVPolicy, frozen=True, tag="cross"):
    """Keys and values of what an encoder made of the request's audio: `length` of them in one page, which its first step fills. Every
    token sees them all. Requests share none of it, nor anything that was computed with it."""

    length: int
    carried: ClassVar[bool] = True
    shares_prefix: ClassVar[bool] = False
    event_kind: ClassVar[str] = "cross_attention"
    fills: ClassVar[Literal["attention", "cross", "state"]] = "cross"

    def num_held(self, block_size: int, num_tokens: int, step_tokens: int = 1) -> int:
        return 1

    def fresh_rows(self, block_size: int, begin: int, end: int, num_computed: int) -> Sequence[int]:
        return [0] if begin == 0 else []

    def tokens_of_page(self, block_size: int) -> int:
        return self.length

    def shape(self, num_heads: int, head_dim: int, num_pages: int, block_size: int) -> tuple[int, ...]:
        """Room for `length` keys in whole blocks."""
        return 2, num_pages, -(-self.length // block_size) * block_size, num_heads, head_dim


class RecurrentState(KVPolicy, frozen=True, tag="state"):
    """One state of fixed size of each sequence (state-space layers), in one page, which is overwritten as the sequence grows.

    The page that a block's place in the table names holds the state behind that block's last token; while it is not full, behind the
    request's last one. Where the next place names the same page, nothing was left here. A page that is left is a *checkpoint*: it is
    not written again, and a prefix that ends there is found by it."""

    # checkpoints: none, where a step ends at their place, or at all places
    mode: Literal["none", "align", "all"] = "align"
    every: int = 1  # blocks from one place to the next
    keeps_all: ClassVar[bool] = False
    event_kind: ClassVar[str] = "mamba"
    carried: ClassVar[bool] = True
    fills: ClassVar[Literal["attention", "cross", "state"]] = "state"

    def first_seen(self, position: int) -> int:
        """A token goes on from the state behind the one before it."""
        return position - 1

    def num_held(self, block_size: int, num_tokens: int, step_tokens: int = 1) -> int:
        """The running state, and the checkpoints that a step may leave."""
        size = block_size * self.every
        most = {"none": 1, "align": 2, "all": -(-(1 + step_tokens) // size) + 1}[self.mode]
        return min(-(-num_tokens // size), most)

    def fresh_rows(self, block_size: int, begin: int, end: int, num_computed: int) -> Sequence[int]:
        """The first, and each behind a checkpoint that is left."""
        first = [0] if begin == 0 else []
        if self.mode == "all":
            return first + [row for row in range(max(begin, 1), end) if self._is_place(row - 1)]
        if begin and num_computed == begin * block_size and self._is_place(begin - 1):
            return [begin]
        return first

    def step_end(self, block_size: int, start: int, count: int) -> int:
        """Where checkpoints are left at the end of steps alone: the last place within these tokens."""
        size = self.every * block_size
        end = (start + count) // size * size
        return end - start if self.mode == "align" and end > start else count

    def drafts_end(self, block_size: int, num_computed: int) -> int | None:
        """Where checkpoints are left at the end of steps alone: the next place, whose page is left before drafts go on behind it."""
        size = self.every * block_size
        return (num_computed // size + 1) * size if self.mode == "align" else None

    @property
    def checkpoint_blocks(self) -> int:
        return 0 if self.mode == "none" else self.every

    def _is_place(self, block: int) -> bool:
        """Whether a checkpoint may be left behind this block."""
        return self.mode != "none" and (block + 1) % self.every == 0

    def shape(self, num_heads: int, head_dim: int, num_pages: int, block_size: int) -> tuple[int, ...]:
        """Layers say how large a state is (workers/kv/layout.py)."""
        raise AssertionError("a state has no tokens")


KVSpec = FullAttention | SlidingWindow | ChunkedAttention | Latent | EncoderOnly | CrossAttention | RecurrentState


class KVGroup(Struct, frozen=True):
    """One block table of a request, and the layers that use it."""

    spec: KVSpec
    layers: tuple[int, ...]
    block_size: int
    page_bytes: int
    layers_per_tensor: int = 1  # whose caches share a tensor: each has this part of a page there


_STATE = RecurrentState()


def caches_of(model: ModelSpec, state: RecurrentState = _STATE) -> list[tuple[int, KVSpec]]:
    """Layer and KVSpec of each cache, in the order of layers: most have one, some a state or what they see of an encoder beside their
    keys and values, some none.

    state: the spec of recurrent states."""
    found: list[tuple[int, KVSpec]] = []
    drafting = len(model.layers) - model.num_draft_layers
    shapes: set[tuple[KVSpec, int, int]] = set()  # of the model's own
    for number, layer in enumerate(model.layers):
        if layer.attention is not None and layer.has_cache:
            spec = EncoderOnly() if model.encoder_only else spec_of_attention(layer.attention)
            shape = spec, layer.attention.num_key_value_heads, layer.attention.head_dim
            if number < drafting:
                shapes.add(shape)
            elif shape not in shapes:
                spec = replace(spec, of_draft=True)
            found.append((number, spec))
        if layer.state is not None:
            found.append((number, state))
        if layer.cross_attention:
            found.append((number, CrossAttention(layer.cross_attention)))
    return found


def spec_of_layers(model: ModelSpec) -> list[KVSpec]:
    """The KVSpec of each cache."""
    return [spec for _, spec in caches_of(model)]


def spec_of_attention(attention: Attention) -> KVSpec:
    """What the attention of a decoder's layer needs of earlier tokens."""
    if (mla := attention.mla) is not None:
        return Latent(mla.kv_lora_rank, mla.qk_rope_head_dim, mla.index_head_dim)
    if attention.attention_chunk_size:
        return ChunkedAttention(attention.attention_chunk_size)
    return SlidingWindow(attention.sliding_window) if attention.sliding_window else FullAttention()


def make_groups(
    specs: Sequence[KVSpec],
    block_size: int,
    layer_bytes: int | Mapping[KVSpec, int],
    max_model_len: int,
    first_layer: int = 0,
) -> tuple[KVGroup, ...]:
    """Groups of these layers (numbered from `first_layer`), equal specs side by side, for requests of up to `max_model_len` tokens.

    `layer_bytes`: of one token's keys and values in one layer, by spec where these differ. The number of tensors is the one with the
    fewest groups whose longest request takes little more than the least memory; where windows save next to nothing, there is one group
    that keeps all, of layers of equal bytes."""
    layers: dict[KVSpec, list[int]] = {}
    for layer, spec in sorted(enumerate(specs, first_layer), key=lambda pair: not pair[1].keeps_all):
        layers.setdefault(spec, []).append(layer)  # what keeps all comes first
    unit, share = shares({spec: layer_bytes if isinstance(layer_bytes, int) else layer_bytes[spec] for spec in layers})

    def tensors(spec: KVSpec) -> int:
        return -(-len(layers[spec]) // share[spec])

    def cost(size: int) -> int:
        return size * sum(-(-tensors(spec) // size) * spec.num_held(block_size, max_model_len) for spec in layers)

    sizes = range(1, max(map(tensors, layers)) + 1)
    least = min(map(cost, sizes))
    every = list(range(first_layer, first_layer + len(specs)))
    everything = next((spec for spec in layers if spec.keeps_all), FullAttention())
    alike = set(share.values()) == {1} and not any(spec.carried for spec in layers)
    if alike and len(every) * everything.num_held(block_size, max_model_len) <= GOOD_ENOUGH * least:
        layers, size, share = {everything: every}, len(every), {everything: 1}
    else:
        size = max(size for size in sizes if cost(size) <= GOOD_ENOUGH * least)
    groups = []
    for spec, some in layers.items():
        count = -(-len(some) // (size * share[spec]))
        # Every count-th layer, not a run of them: so each stage of a pipeline has about the same share of each group.
        groups += [
            KVGroup(spec, tuple(some[n::count]), block_size, size * block_size * unit, share[spec])
            for n in range(count)
        ]
    return tuple(groups)


def shares(layer_bytes: Mapping[KVSpec, int]) -> tuple[int, dict[KVSpec, int]]:
    """Bytes of a token in a tensor, and the layers of each spec that have room in them."""
    unit = lcm(*(count for count in layer_bytes.values() if count)) if any(layer_bytes.values()) else 0
    return unit, {spec: unit // count if count else 1 for spec, count in layer_bytes.items()}


def block_size_with_states(block_size: int, token_bytes: int, state_bytes: int) -> int:
    """Tokens of a block, at least `block_size`, of which the keys and values of one layer take the bytes of one layer's state."""
    needed = -(-state_bytes // token_bytes) if token_bytes else 0
    return block_size if needed <= block_size else -(-needed // BLOCK_STEP) * BLOCK_STEP


def block_size_with_cross_attention(block_size: int, layers: int, length: int, max_model_len: int) -> int:
    """Tokens of a block, at least `block_size`, with which the longest request of a model of so many layers takes little more than the
    least memory, and has few groups.

    One page has `length` tokens of an encoder for some of the layers, or a block of tokens for several times as many."""
    kinds = (FullAttention(), CrossAttention(length))
    specs: list[KVSpec] = [spec for _ in range(layers) for spec in kinds]

    def taken(size: int) -> tuple[int, int]:
        """Memory, and the number of groups."""
        groups = make_groups(specs, size, {kinds[0]: 1, kinds[1]: -(-length // size)}, max_model_len)
        return pages_of([group.spec for group in groups], size, max_model_len) * groups[0].page_bytes, len(groups)

    longest = max(block_size, -(-length // BLOCK_STEP) * BLOCK_STEP)
    found = {size: taken(size) for size in range(longest, block_size - 1, -BLOCK_STEP)}
    enough = GOOD_ENOUGH * min(found.values())[0]
    return min((groups, memory, -size) for size, (memory, groups) in found.items() if memory <= enough)[2] * -1


def waste(groups: Sequence[KVGroup], cache_bytes: dict[KVSpec, int], page_bytes: int, num_tokens: int) -> float:
    """The part of a request's pages that holds nothing, of `num_tokens` tokens: layers that a group lacks, and bytes that a state
    leaves of its page. cache_bytes: of one layer's cache in a page."""
    held = [(group, group.spec.num_held(group.block_size, num_tokens)) for group in groups]
    used = sum(count * len(group.layers) * cache_bytes[group.spec] for group, count in held)
    whole = page_bytes * sum(count for _, count in held)
    return 1 - used / whole if whole else 0.0


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
