"""Attention by the Triton kernels: decodes split over the GPU, everything else by tiles of queries, beside one another.

Decodes wait for memory, prompts for arithmetic.
"""

from functools import cache, cached_property

import torch
from torch import Tensor

from meshlm.kernels.attention.decode import Rope, decode
from meshlm.kernels.attention.kernel import EVERYTHING, PLAIN, Columns, Extras, SharedPrefixes
from meshlm.kernels.attention.prefill import prefill
from meshlm.kernels.attention.self_test import self_test_chunks, self_test_heads, self_test_slopes
from meshlm.kernels.attention.shared_prefix import shared_prefix
from meshlm.kernels.attention.tiles import (
    LARGE_DIM,
    Variant,
    decode_tiles,
    most_parts,
    shared_tile,
    tile_of_head,
    verify_tile,
)
from meshlm.kernels.attention.verify import verify
from meshlm.kernels.lightning_index.self_test import IndexShape, self_test_index
from meshlm.kernels.states import Pieces
from meshlm.protocol.layers import StateSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.attention.aux_stream import AuxStream
from meshlm.workers.attention.sparse_latent import ToChoose
from meshlm.workers.attention.triton_latent import (
    LatentWorkspace,
    TritonLatentAttention,
    TritonSparseAttention,
    not_verified,
)
from meshlm.workers.batch import UNKNOWN, CrossCache, LayerCache, StepInputs
from meshlm.workers.layers.ops import AttentionShape, LatentShape, LayerStep
from meshlm.workers.states.self_test import self_test_states
from meshlm.workers.states.triton_states import KINDS, TritonStates, pieces_of

WORKSPACE_FLOATS = 1 << 22
MOST_RANK = 512
MOST_DIM = 512


class Workspace:
    """Room for the parts of split contexts, shared by all layers and steps (they run one after the other). CUDA graphs keep its
    address, so it must not move once there are any. The number of parts depends on the GPU only, not on the requests of a step: it
    has its final size after the first decode of each shape of heads, which is while kernels are warmed up."""

    def __init__(self, device: torch.device, most_parts: int) -> None:
        """most_parts: programs x splits of any decode (kernels/attention/tiles.py)."""
        self._most_parts = most_parts
        self._flat = torch.empty(WORKSPACE_FLOATS, device=device)
        self._counters = torch.zeros(most_parts, dtype=torch.int32, device=device)
        self._shared: list[Tensor] = []  # the latest is the largest

    def of(self, requests: int, heads: tuple[int, int], splits: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sums [requests, heads, splits, dim], maxima and weights [.., 2], and counters, flat. heads: of queries, of keys."""
        num_heads, num_kv_heads = heads
        most = self._most_parts * (num_heads // num_kv_heads)
        if self._flat.numel() < most * (dim + 2):
            self._flat = torch.empty(most * (dim + 2), device=self._flat.device)
        used = requests * num_heads * splits if splits > 1 else 0
        assert used <= most
        return self._flat[: used * dim], self._flat[used * dim :], self._counters

    def of_shared(self, requests: int, num_heads: int, slots: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """The same for decodes that share prefixes. What needs more than was there gets a new room: graphs keep theirs."""
        used = requests * num_heads * slots
        if not self._shared or self._shared[-1].numel() < used * (dim + 2):
            floats = 1 << (used * (dim + 2) - 1).bit_length()
            self._shared.append(torch.empty(floats, device=self._flat.device))
        flat = self._shared[-1]
        return flat[: used * dim], flat[used * dim :], self._counters

    def of_verified(self, tokens: int, num_heads: int, splits: int, dim: int) -> tuple[Tensor, Tensor]:
        """The same for steps that verify drafts, whose parts are combined by a kernel that counts nothing."""
        return self.of_shared(tokens if splits > 1 else 0, num_heads, splits, dim)[:2]


class TritonAttention:
    """One step. Needs `batch.columns`."""

    def __init__(
        self, batch: StepInputs, block_size: int, workspace: Workspace, side: AuxStream, latent: LatentWorkspace
    ) -> None:
        assert batch.columns is not None
        self._batch, self._workspace, self._side = batch, workspace, side
        self._block_size, self._states = block_size, dict[int, TritonStates]()
        self._pieces: Pieces | None = None  # of the prompts, for all groups with states
        self._alone: tuple[Tensor, Tensor, Tensor] | None = None  # columns of the tokens, each as a request of its own
        columns = batch.columns
        self._longest = batch.longest or columns.blocks.shape[1] * block_size
        self._latent = TritonLatentAttention(batch, latent, side)
        self._sparse = TritonSparseAttention(batch, latent)
        self._num = columns.n if batch.num_decodes == UNKNOWN else batch.num_decodes
        shared = (columns.rows, columns.starts, columns.ends)
        self._columns = [Columns(*shared, columns.n, blocks) for blocks in batch.block_tables]  # by group
        self._decodes = [Columns(*shared, self._num, blocks) for blocks in batch.block_tables]

    def attend(
        self, qkv: Tensor, step: LayerStep, heads: AttentionShape, scale: float, sliding_window: int = 0
    ) -> Tensor:
        ops, batch, table, cache = step
        scales = cache.k_scale, cache.v_scale
        extras = Extras(sliding_window, heads.softcap, heads.sinks, *scales, heads.chunk, heads.slopes)
        decodes, columns = self._batch.num_decodes, self._columns[cache.group]
        shared = self._shared(cache, heads, extras)
        fused = batch.turned_by is None  # else each token has a line of its own in the table of a step
        if decodes == columns.n and shared is None and self._batch.verified is None and fused:
            out = torch.empty(qkv.shape[0], heads.num_heads, heads.head_dim, dtype=qkv.dtype, device=qkv.device)
            rope = Rope(table, heads.norms, heads.eps, heads.num_heads)
            self._decode(qkv, cache, scale, out, extras, rope)
            return out
        query = ops.rope_cache(qkv, batch, table, cache, heads)
        out = torch.empty_like(query)
        if decodes == columns.n:
            self._decode(query, cache, scale, out, extras, None, shared)
        elif decodes:
            self._side.both(
                lambda: self._decode(query, cache, scale, out, extras, None, shared),
                lambda: self._prompts(query, qkv, cache, scale, out, extras),
            )
        else:
            self._prompts(query, qkv, cache, scale, out, extras)
        return out

    def _shared(self, cache: LayerCache, heads: AttentionShape, extras: Extras) -> SharedPrefixes | None:
        """The prefixes that decodes of this layer read together: where queries see all keys before them."""
        if extras.span != EVERYTHING or heads.head_dim > LARGE_DIM or self._batch.verified is not None:
            return None
        return self._batch.shared.get(cache.group)

    def _prompts(
        self, query: Tensor, qkv: Tensor, cache: LayerCache, scale: float, out: Tensor, extras: Extras
    ) -> None:
        """Attention of the requests that are no decodes. In a graph, whose numbers of either are not known, each kernel leaves the
        other's requests alone."""
        decodes = self._batch.num_decodes
        skip, fewest = (0, 2) if decodes == UNKNOWN else (decodes, 1)
        prefill(
            query, cache.keys, cache.values, self._columns[cache.group], scale, out, skip, extras,
            qkv=qkv, fewest=fewest, num_pairs=self._pairs(extras.window or extras.chunk),
        )  # fmt: skip

    def _pairs(self, most: int) -> int | None:
        """Prompt tokens x the keys that each sees in a layer where it sees so many at most (0: any number). None in a graph whose
        prompts are not known."""
        known, each = self._batch.known, self._batch.seen
        if known is None:
            return len(self._batch.input_ids) * (min(each, most) if most else each) if each else None
        seen = ((prompt.num_tokens, prompt.start + prompt.num_tokens // 2) for prompt in known.prompts)
        return sum(count * (min(keys, most) if most else keys) for count, keys in seen)

    def attend_latent(
        self, query: Tensor, latent: Tensor, step: LayerStep, heads: LatentShape, scale: float, chosen: ToChoose = None
    ) -> Tensor:
        ops, batch, table, cache = step
        lines, columns = cache.keys.squeeze(2), self._columns[cache.group]
        if chosen is not None:
            ops.latent_cache(query, latent, batch, table, cache, heads)
            slots = batch.slot_mapping[cache.group]
            return self._sparse.attend(query, chosen, slots, lines, columns, heads, scale)
        if self._latent.is_few(columns):
            slots = batch.slot_mapping[cache.group]
            return self._latent.attend_few(query, latent, table, slots, lines, columns, heads, scale)
        ops.latent_cache(query, latent, batch, table, cache, heads)
        return self._latent.attend(query, latent, lines, columns, heads, scale)

    def attend_cross(self, query: Tensor, cache: CrossCache, scale: float) -> Tensor:
        """Each token as a request that decodes: it stands behind the last of what the encoder left, in one long block."""
        if self._alone is None:
            self._alone = _alone(self._columns[cache.group], len(query), cache.length)
        out = torch.empty_like(query)
        blocks = self._batch.block_tables[cache.group]
        columns = Columns(*self._alone, len(query), blocks)
        self._split(query, (cache.keys, cache.values), columns, cache.length, scale, out, PLAIN, None)
        return out

    def states(self, group: int) -> TritonStates:
        if not self._states:
            self._pieces = pieces_of(self._batch, self._block_size)
        found = self._states.get(group)
        if found is None:
            found = self._states[group] = TritonStates(self._batch, group, self._block_size, self._pieces)
        return found

    def _decode(
        self,
        query: Tensor,
        cache: LayerCache,
        scale: float,
        out: Tensor,
        extras: Extras,
        rope: Rope | None,
        shared: SharedPrefixes | None = None,
    ) -> None:
        both, columns, verified = (cache.keys, cache.values), self._decodes[cache.group], self._batch.verified
        if verified is None or self._batch.num_decodes == UNKNOWN:
            if verified is not None:
                rest = self._not_verified
                columns = Columns(rest.rows, rest.starts, rest.ends, rest.n, columns.blocks)
            self._split(query, both, columns, self._longest, scale, out, extras, rope, shared)
        if verified is not None:
            self._verify(query, cache, verified, scale, out, extras)

    @cached_property
    def _not_verified(self) -> Columns:
        return not_verified(self._batch)

    def _verify(
        self, query: Tensor, cache: LayerCache, verified: Columns, scale: float, out: Tensor, extras: Extras
    ) -> None:
        """Attention of the requests whose drafts the step verifies: each context is read once for all tokens of its request."""
        keys, queries, (_, heads, dim) = cache.keys, self._batch.queries, out.shape
        kv_heads = keys.shape[2]
        columns = Columns(
            verified.rows, verified.starts, verified.ends, verified.n, self._batch.block_tables[cache.group]
        )
        tokens = min(self._num, verified.n * queries, len(out))
        tile = verify_tile(tokens, queries, kv_heads, self._longest, out.device, heads // kv_heads, dim)
        scratch = self._workspace.of_verified(tokens, heads, tile.splits, dim)
        verify(query, keys, cache.values, columns, scale, out, scratch, queries, tile, extras)

    def _split(
        self,
        query: Tensor,
        cache: tuple[Tensor, Tensor],
        columns: Columns,
        longest: int,
        scale: float,
        out: Tensor,
        extras: Extras,
        rope: Rope | None,
        shared: SharedPrefixes | None = None,
    ) -> None:
        """Decodes of `columns`, whose contexts have up to `longest` tokens. cache: keys and values."""
        keys, values = cache
        _, heads, dim = out.shape
        kv_heads = keys.shape[2]
        tiles = decode_tiles(columns.n * kv_heads, longest, query.device, heads // kv_heads, dim)
        splits, block_n, warps, stages = tile_of_head(tiles, dim)
        if shared is None:
            scratch = self._workspace.of(columns.n, (heads, kv_heads), splits, dim)
        else:
            scratch = self._workspace.of_shared(columns.n, heads, shared.slots(splits), dim)
            keys_of_tile, of_warps, of_stages = shared_tile(dim)
            shared_prefix(
                query, keys, values, columns, shared, scale, scratch, splits, extras,
                block_n=keys_of_tile, warps=of_warps, stages=of_stages,
            )  # fmt: skip
        decode(
            query, keys, values, columns, scale, out, scratch, splits, extras, rope, shared,
            block_n=block_n, warps=warps, stages=stages,
        )  # fmt: skip


def _alone(columns: Columns, tokens: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, starts and ends of a step's tokens, each as a request of its own whose context has `length` tokens."""
    each = torch.arange(1, tokens + 1, dtype=torch.int32, device=columns.rows.device)
    nth = torch.searchsorted(columns.ends[: columns.n], each).clamp(max=columns.n - 1)
    return columns.rows[nth], torch.full_like(each, length - 1), each


def _without_states(state: StateSpec, page: int, dtype: torch.dtype, device: torch.device) -> str:
    """Why it cannot compute such states here; "" when it can. state.dtype: of what the cache holds."""
    if state.kind not in KINDS:
        return f"it has no kernels for the states of {state.kind}"
    if state.kind == "gated_delta_net" and not all(32 <= size <= 256 for size in (state.head_dim, state.state_size)):
        return f"it has kernels for gated delta nets with heads of 32 to 256, these have {state.state_size} and {state.head_dim}"
    reason = self_test_states(state, page, _ssm(state, dtype), dtype, device)
    return f"its kernels for the states of {state.kind} are not right on this GPU: {reason}" if reason else ""


def states_in_graphs(state: StateSpec, page: int, dtype: torch.dtype, device: torch.device) -> str:
    """Why CUDA graphs must not hold prompts with such states here; "" when they may."""
    reason = self_test_states(state, page, _ssm(state, dtype), dtype, device, in_graphs=True)
    return f"prompts with the states of {state.kind} are not right in graphs on this GPU: {reason}" if reason else ""


def _ssm(state: StateSpec, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if state.dtype == "float32" else dtype


@cache
def _wrong_chunks(variant: Variant, device: torch.device) -> str:
    reason = self_test_chunks(variant, device)
    return f"its attention in chunks (attention_chunk_size) is not right on this GPU: {reason}" if reason else ""


@cache
def _wrong_heads(variant: Variant, device: torch.device) -> str:
    reason = self_test_heads(variant, device)
    return f"its attention of heads of {variant.dim} is not right on this GPU: {reason}" if reason else ""


def _wrong_pages(spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device) -> str:
    """Why it cannot read pages of audio, which have any length, and blocks that go with them."""
    assert spec.audio_encoder is not None
    shape = (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim)
    for page in (block_size, -(-spec.audio_encoder.max_source_positions // block_size) * block_size):
        if reason := _wrong_heads(Variant(*shape, page, dtype, windowed=False, capped=False), device):
            return f"with blocks of {page} tokens {reason}"
    return ""


def _head_sizes(spec: ModelSpec) -> set[tuple[int, int]]:
    """Key-value heads of the layers that attend, and their size; latents have kernels of their own."""
    return {(one.num_key_value_heads, one.head_dim) for one in spec.attentions}


@cache
def _wrong_slopes(variant: Variant, slopes: tuple[float, ...], device: torch.device) -> str:
    reason = self_test_slopes(variant, slopes, device)
    return f"its slopes of heads (ALiBi) are not right on this GPU: {reason}" if reason else ""


@cache
def _wrong_index(shape: IndexShape, dtype: torch.dtype, device: torch.device) -> str:
    reason = self_test_index(shape, dtype, device)
    return f"its attention to chosen tokens (index_topk) is not right on this GPU: {reason}" if reason else ""


def _wrong(spec: ModelSpec, device: torch.device, dtype: torch.dtype, page: int) -> str:
    """Why it cannot compute the attention of such a model; "" when it can. Tested here where few models ask for it."""
    if spec.mla is not None:
        mla, heads = spec.mla, spec.num_attention_heads
        index = IndexShape(
            heads, mla.kv_lora_rank, mla.qk_rope_head_dim, mla.index_n_heads, mla.index_head_dim, mla.index_topk, page
        )
        return _wrong_index(index, dtype, device) if mla.index_topk else ""
    capped = spec.attn_logit_softcapping > 0
    for kv_heads, dim in _head_sizes(spec):
        large = Variant(spec.num_attention_heads, kv_heads, dim, page, dtype, windowed=False, capped=capped)
        if dim > LARGE_DIM and (reason := _wrong_heads(large, device)):
            return reason
    shape = (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim, page)
    variant = Variant(*shape, dtype, windowed=False, capped=capped)
    if any(one.attention_chunk_size for one in spec.attentions) and (reason := _wrong_chunks(variant, device)):
        return reason
    return _wrong_slopes(variant, spec.alibi_slopes, device) if spec.alibi_slopes else ""


class TritonBackend:
    name, graphs, fp8 = "triton", True, True
    attention = TritonAttention  # what computes a step

    def __init__(self) -> None:
        self._of: dict[torch.device, tuple[Workspace, AuxStream, LatentWorkspace]] = {}

    def unsupported(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, block_size: int) -> str:
        if device.type != "cuda":
            return "it needs a CUDA device"
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"it needs compute capability 8.0, this GPU has {major}.{minor}"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"it computes in --dtype float16 or bfloat16, not {str(dtype).removeprefix('torch.')}"
        for _, dim in _head_sizes(spec):
            if not 16 <= dim <= MOST_DIM:
                return f"it supports head sizes from 16 to {MOST_DIM}, this model has {dim}"
        if spec.mla is not None and spec.mla.kv_lora_rank > MOST_RANK:
            return f"it supports latents of up to {MOST_RANK}, this model has kv_lora_rank {spec.mla.kv_lora_rank}"
        if spec.state is not None:
            return _without_states(spec.state, block_size, dtype, device)
        if spec.audio_encoder is not None:
            return _wrong_pages(spec, block_size, dtype, device)
        if block_size & (block_size - 1) or block_size < 8:
            return f"--block-size {block_size} is not a power of two from 8 up"
        return _wrong(spec, device, dtype, block_size)

    def step(self, batch: StepInputs, block_size: int) -> TritonAttention:
        own = self._of.get(batch.device)
        if own is None:
            workspaces = Workspace(batch.device, most_parts(batch.device)), LatentWorkspace(batch.device)
            own = self._of[batch.device] = workspaces[0], AuxStream(batch.device), workspaces[1]
        return self.attention(batch, block_size, *own)
