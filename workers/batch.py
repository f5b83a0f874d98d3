"""The explicit record that a model's forward takes, one step's tensors, and a layer's KV memory. Nothing about a step is global."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from meshlm.kernels.float8 import as_bytes, stored

if TYPE_CHECKING:
    from meshlm.kernels.attention.kernel import Columns, SharedPrefixes
    from meshlm.workers.lora.step_adapters import StepAdapters


VECTOR = -1  # the id of a token that came as a vector
MEDIA = -2  # the id of a token that came as a vector of an image
UNKNOWN = -1  # num_decodes of a CUDA graph that any mix of requests is replayed with


@dataclass(frozen=True, slots=True)
class RequestLens:
    """The lengths of a step's requests that the host knows, for backends that launch by them."""

    seq_lens: Tensor  # int64 [n] context length, this step's tokens included
    query_lens: tuple[int, ...]  # of the requests after the decodes
    context_lens: tuple[int, ...]  # of the same requests, this step included
    max_decode_len: int  # longest context among the decodes


class Prompt(NamedTuple):
    """A request of a step that is no decode."""

    row: int
    start: int  # tokens of earlier steps
    first: int  # token of this step
    num_tokens: int


class UncutRun(NamedTuple):
    """Tokens of a request that attend to one another; some of them are in this step."""

    place: int  # of the request, in the batch
    row: int
    first: int  # token of this step that is the run's, ...
    num_tokens: int  # ... and how many there are
    start: int  # the position of that first one
    begin: int  # positions of the whole run
    end: int


class KnownRequests(NamedTuple):
    """The host's knowledge of the requests of a step, or of a half of one: decodes stand before prompts."""

    num_decodes: int  # of the step: the first requests of its columns
    decode_tokens: int  # of those decodes in this half, where they are the first tokens
    prompts: tuple[Prompt, ...]

    def within(self, begin: int, end: int) -> "KnownRequests":
        """The part of the step that has its tokens begin to end."""
        found = []
        for row, start, first, count in self.prompts:
            low, high = max(first, begin), min(first + count, end)
            if low < high:
                found.append(Prompt(row, start + low - first, low - begin, high - low))
        tokens = max(0, min(self.decode_tokens, end) - begin)
        return KnownRequests(self.num_decodes, tokens, tuple(found))


@dataclass(frozen=True, slots=True)
class StepInputs:
    """n requests, t tokens; the first `num_decodes` requests have one token each and stand first.

    Either `lens` or `columns` is there: a CUDA graph is replayed with requests that the host knew nothing of."""

    input_ids: Tensor  # int64 [t]
    positions: Tensor  # int64 [t]
    slot_mapping: tuple[Tensor, ...]  # by group of layers (protocol/kv.py): int64 [t] block * block_size + offset
    # By group. With lens int64 [n, blocks of the longest context]; with columns those of all rows, int32 [rows, blocks]. A block that
    # a layer's tokens see no more has a new owner, of any group: what its place in a table names must not be read.
    block_tables: tuple[Tensor, ...]
    logits_indices: Tensor | None  # int64 [l] tokens whose logits are wanted; None: all of them, in order
    num_decodes: int
    lens: RequestLens | None = None
    columns: "Columns | None" = None  # the requests on the device, for backends that read those (triton)
    known: KnownRequests | None = None  # beside columns, outside of CUDA graphs
    # In a CUDA graph for certain contexts, in keys: what each token of a prompt sees, about; what a decode sees at the most. 0: unknown
    seen: int = 0
    longest: int = 0
    # int32 [l], beside columns: the requests whose logits they are; None: all of them, in order
    places: Tensor | None = None

    # By group of layers, where requests of models with states have drafts: int64 [n, tokens], the pages that get the state behind each
    # token of such a request; -1 in a request's row: its state goes where its block table says (states/drafted.py)
    draft_pages: tuple[Tensor, ...] = ()
    token_types: Tensor | None = None  # int64 [t], for encoders: 1 for a pair's second text; None: all are 0
    # [t, hidden]: what tokens of the ids VECTOR and MEDIA stand for; None: there are none of these
    vectors: Tensor | None = None
    # int64 [3, t], of models with M-RoPE: what is added to a token's position to have its frame, row and column; None: nothing to any
    rope_shift: Tensor | None = None
    # [layers, t, hidden]: what is added to the residual behind the first layers; None: nothing
    deepstack: Tensor | None = None
    uncut: tuple[UncutRun, ...] = ()  # of steps that are no CUDA graph (attention/uncut.py)
    turned_by: Tensor | None = None  # int64 [t]: the lines of the rotation's table, where these are not the positions
    adapters: "StepAdapters | None" = None  # of its rows; None: no row has one
    # By group of layers that see all tokens, beside columns: the decodes that read prefixes together.
    shared: "Mapping[int, SharedPrefixes]" = field(default_factory=dict)
    # Of a step that verifies drafts, whose decodes are the step's first tokens, each a request of its own in `columns` (its row
    # repeated, starts its position, ends 1, 2, ...), and the first `num_decodes` of these: the requests that they are of, in order.
    # rows, starts: position of the first token in the step; ends: tokens up to the request's last one; 0 .. `queries` tokens each.
    # What a token's siblings before it leave in the cache it sees, so keys and values are written before anybody attends.
    verified: "Columns | None" = None
    queries: int = 1

    @property
    def device(self) -> torch.device:
        return self.input_ids.device

    @property
    def rope_lines(self) -> Tensor:
        """int64 [t]: by which lines of the rotation's table queries and keys turn."""
        return self.positions if self.turned_by is None else self.turned_by

    @property
    def known_ids(self) -> Tensor:
        """int64 [t]: the ids of tokens, any of those that came as vectors."""
        return self.input_ids if self.vectors is None else self.input_ids.clamp(min=0)

    def with_vectors(self, states: Tensor) -> Tensor:
        """The first layer's states [t, ...], of which some came with prompts: these are taken as they are, also where a model scales
        its own."""
        if self.vectors is None:
            return states
        return torch.where((self.input_ids < 0)[:, None], self.vectors.to(states.dtype), states)


@dataclass(frozen=True, slots=True)
class StateCache:
    """The recurrent states of one layer, by page (protocol/kv.py: RecurrentState). Halves lie apart: a page has a place in each."""

    ssm: Tensor  # [2, pages, half of the heads, head_dim, state_size]
    conv: Tensor  # [2, pages, half of the channels, conv_kernel - 1]
    group: int  # whose block tables it has


class CrossCache(NamedTuple):
    """The part of an encoder's states that one layer of the decoder sees, by page (protocol/kv.py: CrossAttention)."""

    keys: Tensor  # [pages, at least length, num_kv_heads, head_dim]
    values: Tensor
    group: int  # whose block tables it has; a request's place 0 names its page
    length: int


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's KV memory, by block and, for writing, by slot (workers/kv/layout.py)."""

    keys: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]; of latent attention one head, whose dimensions are a line's
    values: Tensor  # of latent attention the keys, whose first numbers they are
    k_scale: float = 1.0  # of an FP8 cache: keys are stored divided by it
    v_scale: float = 1.0
    group: int = 0  # whose slots and block tables it has
    state: StateCache | None = None  # of a layer that has one; its keys and values are empty, unless it attends, too
    cross: CrossCache | None = None  # of a layer that sees an encoder's states, too

    def tensors(self) -> list[Tensor]:
        """All memory of the layer: what sleep gives back, and what a page is moved from and to."""
        found = [self.keys, self.values]
        if self.state is not None:
            found += [self.state.ssm, self.state.conv]
        if self.cross is not None:
            found += [self.cross.keys, self.cross.values]
        return found

    def flat(self) -> tuple[Tensor, Tensor]:
        """Both as [num_blocks * block_size, num_kv_heads, head_dim]."""
        return self.keys.flatten(0, 1), self.values.flatten(0, 1)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Both [t, num_kv_heads, head_dim] to their slots, in plain torch."""
        for lines, new, scale in zip(self.flat(), (keys, values), (self.k_scale, self.v_scale), strict=True):
            as_bytes(lines).index_copy_(0, slots, as_bytes(stored(new, scale, lines.dtype)))

    def read(self, at: Tensor, dtype: torch.dtype, *, blocks: bool = False) -> tuple[Tensor, Tensor]:
        """Keys and values of these slots [*at, num_kv_heads, head_dim], in plain torch; dtype: of the model.

        blocks: `at` names blocks, whose slots are one more dimension."""
        keys, values = (
            as_bytes(lines)[at].view(lines.dtype) for lines in ((self.keys, self.values) if blocks else self.flat())
        )
        if keys.dtype == dtype:
            return keys, values
        return keys.to(dtype) * self.k_scale, values.to(dtype) * self.v_scale
