"""Multi-head latent attention by the Triton kernels (kernels/mla).

Decodes are absorbed (few of them in three launches), and so is everything in a CUDA graph of any mix of requests. Otherwise the tokens
of a step's prompts see one another projected up, where there are enough of them, and so they see what earlier steps have cached;
absorbed where many requests have such a context.

Latent attention to the tokens that an index chooses, by the Triton kernels (kernels/lightning_index, kernels/mla).

Each token of a step is computed as a request with one: scores of all tokens that it sees, the slots of the best, attention to those.
Shapes do not depend on what requests are, so any step may be in a CUDA graph.
"""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.lightning_index.kernel import index_scores, keep_keys, select
from meshlm.kernels.mla import dense
from meshlm.kernels.mla.decode import decode
from meshlm.kernels.mla.few import ROWS, absorb_cache, decode_values
from meshlm.kernels.mla.prefill import prefill
from meshlm.kernels.mla.tiles import decode_tile, most_parts, verify_tile
from meshlm.workers.attention.aux_stream import AuxStream
from meshlm.workers.attention.sparse_latent import Chosen, LastChoice
from meshlm.workers.batch import UNKNOWN, Prompt, StepInputs
from meshlm.workers.layers.ops import LatentShape

DENSE_FROM = 32
"""Tokens of prompts in a step from which on projecting them up pays."""
PIECE = 4096  # tokens of a context that are projected up at a time; a multiple of every size of pages
FEW_CONTEXTS = 8  # requests with one, in a step


class LatentWorkspace:
    """Room for the parts of split contexts, shared by all layers and steps. It has its final size after the first decode; the heads of
    drafts are more, and get a new room: CUDA graphs keep theirs."""

    def __init__(self, device: torch.device) -> None:
        self._rooms = [torch.empty(0, device=device)]  # the latest is the largest

    def of(self, requests: int, heads: int, splits: int, rank: int) -> tuple[Tensor, Tensor]:
        """Sums [requests, heads, splits, rank], maxima and weights [.., 2], flat."""
        flat = self._rooms[-1]
        most = most_parts(heads, flat.device) * heads
        if flat.numel() < most * (rank + 2):
            flat = torch.empty(most * (rank + 2), device=flat.device)
            self._rooms.append(flat)
        used = requests * heads * splits if splits > 1 else 0
        assert used <= most
        return flat[: used * rank], flat[used * rank :]


def not_verified(batch: StepInputs) -> Columns:
    """The columns of a step without the verified tokens: those that had one have none. The device alone knows which these are.

    But the first request, which has all of them: where that is one, it is computed for nothing, and before the verified ones."""
    of, verified = batch.columns, batch.verified
    assert of is not None
    assert verified is not None
    ends = of.ends.maximum(verified.ends[verified.n - 1])
    return Columns(of.rows, of.starts, ends, of.n, of.blocks)


class TritonLatentAttention:
    def __init__(self, batch: StepInputs, workspace: LatentWorkspace, side: AuxStream) -> None:
        self._batch, self._workspace, self._side = batch, workspace, side

    @cached_property
    def _not_verified(self) -> Columns:
        return not_verified(self._batch)

    def is_few(self, columns: Columns) -> bool:
        """Whether `attend_few` computes the step. It writes latents as it goes, so no token may see another of the step."""
        return columns.n <= ROWS and self._batch.num_decodes == columns.n and self._batch.verified is None

    def attend_few(
        self,
        query: Tensor,
        latent: Tensor,
        table: Tensor,
        slots: Tensor,
        cache: Tensor,
        columns: Columns,
        heads: LatentShape,
        scale: float,
    ) -> Tensor:
        """Few decodes, whose latents are neither normed nor in the cache yet. See `attend`; slots: where they belong there."""
        positions, n = self._batch.positions, columns.n
        absorbed = absorb_cache(query, latent, positions, slots, table, heads.norm, heads.up, cache, heads.wide)
        out = torch.empty(n, heads.num_heads, heads.wide, dtype=query.dtype, device=query.device)
        tile = decode_tile(n, heads.num_heads, query.device)
        room = self._workspace.of(n, heads.num_heads, tile.splits, heads.rank)
        decode_values(absorbed, query, cache, columns, scale, heads.up, out, room, tile)
        return out

    def attend(
        self, query: Tensor, latent: Tensor, cache: Tensor, columns: Columns, heads: LatentShape, scale: float
    ) -> Tensor:
        """query [t, heads, nope + rotary], latent [t, rank + rotary], which are in the cache [blocks, page, rank + rotary] too.
        columns: those of the step, with the layer's block tables."""
        known = self._batch.known
        if known is None or query.shape[0] - known.decode_tokens < DENSE_FROM:
            return self._absorbed(query, cache, columns, heads, scale)
        if not dense.supported(query, latent, heads.up, heads.wide):
            return self._absorbed(query, cache, columns, heads, scale)
        out = torch.empty(query.shape[0], heads.num_heads, heads.wide, dtype=query.dtype, device=query.device)
        tokens, whole = known.decode_tokens, self._batch.num_decodes == known.num_decodes
        skip = known.num_decodes if whole else 0

        def prompts() -> None:
            prior = None
            if any(prompt.start for prompt in known.prompts):
                prior = self._context(query, cache, columns, known.prompts, skip, heads, scale)
            up = F.linear(latent[:, : heads.rank], heads.up)
            dense.dense(query, latent, up, columns, scale, out, skip, prior=prior)

        def few() -> None:
            found = self._decoded(query[:tokens], cache, columns, known.num_decodes, heads, scale)
            heads.values(found, out[:tokens])

        if whole and tokens:
            self._side.both(few, prompts)
        else:  # a half, in which the decodes are not left out: what prompts() computes for them is overwritten
            prompts()
            if tokens:
                few()
        return out

    def _absorbed(self, query: Tensor, cache: Tensor, columns: Columns, heads: LatentShape, scale: float) -> Tensor:
        decodes = self._batch.num_decodes
        absorbed = heads.absorb(query)
        found = torch.empty_like(absorbed)
        num = columns.n if decodes == UNKNOWN else decodes
        # In a graph, whose numbers of either are not known, each kernel leaves the other's requests alone.
        skip, fewest = (0, 2) if decodes == UNKNOWN else (decodes, 1)

        def prompts() -> None:
            prefill(absorbed, query, cache, columns, scale, found, skip, fewest)

        def few() -> None:
            self._decode(absorbed, query, cache, columns, num, heads, scale, found)

        if decodes == columns.n:
            few()
        elif decodes:
            self._side.both(few, prompts)
        else:
            prompts()
        return heads.values(found)

    def _decoded(
        self, query: Tensor, cache: Tensor, columns: Columns, num: int, heads: LatentShape, scale: float
    ) -> Tensor:
        absorbed = heads.absorb(query)
        found = torch.empty_like(absorbed)
        self._decode(absorbed, query, cache, columns, num, heads, scale, found)
        return found

    def _decode(
        self,
        absorbed: Tensor,
        query: Tensor,
        cache: Tensor,
        columns: Columns,
        num: int,
        heads: LatentShape,
        scale: float,
        out: Tensor,
    ) -> None:
        """Attends for the first `num` requests, which have one token each, or for the requests that these are verified tokens of."""
        verified, first = self._batch.verified, columns
        if verified is None or self._batch.num_decodes == UNKNOWN:
            if verified is not None:
                first = self._not_verified
            first = Columns(first.rows, first.starts, first.ends, num, columns.blocks)
            tile = decode_tile(num, heads.num_heads, query.device)
            scratch = self._workspace.of(num, heads.num_heads, tile.splits, heads.rank)
            decode(absorbed, query, cache, first, scale, out, scratch, tile)
        if verified is not None:
            queries, tokens = self._batch.queries, min(num, len(absorbed), verified.n * self._batch.queries)
            mine = Columns(verified.rows, verified.starts, verified.ends, verified.n, columns.blocks)
            tile = verify_tile(tokens, queries, heads.num_heads, query.device)
            scratch = self._workspace.of(-(-tokens // queries), queries * heads.num_heads, tile.splits, heads.rank)
            decode(absorbed, query, cache, mine, scale, out, scratch, tile, queries=queries)

    def _context(
        self,
        query: Tensor,
        cache: Tensor,
        columns: Columns,
        prompts: tuple[Prompt, ...],
        skip: int,
        heads: LatentShape,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Adds what prompts see of earlier steps (`dense.dense`). Projected up piece by piece, or absorbed if many have a context."""
        sums = torch.full(query.shape[:2], -torch.inf, device=query.device)
        if sum(prompt.start > 0 for prompt in prompts) > FEW_CONTEXTS:
            absorbed = heads.absorb(query)
            found = torch.zeros_like(absorbed)
            prefill(absorbed, query, cache, columns, scale, found, skip, context=sums)
            return heads.values(found), sums
        out = torch.zeros(*query.shape[:2], heads.wide, device=query.device)
        page = cache.shape[1]
        for row, start, first, count in prompts:
            own = slice(first, first + count)
            for begin in range(0, start, PIECE):
                blocks = columns.blocks[row, begin // page : -(-min(begin + PIECE, start) // page)]
                lines = cache.index_select(0, blocks).flatten(0, 1)[: start - begin]
                up = F.linear(lines[:, : heads.rank], heads.up)
                dense.context(query[own], lines, up, scale, (out[own], sums[own]))
        return out, sums


MOST_SCORES = 1 << 24  # at a time: 64 MiB, of some queries with the longest context that there may be


class TritonSparseAttention:
    def __init__(self, batch: StepInputs, workspace: LatentWorkspace) -> None:
        self._batch, self._workspace = batch, workspace
        self._seen: tuple[Tensor, Tensor] | None = None  # the same for all layers
        self._choice: tuple[Tensor, Tensor] | None = None  # of the last index

    def attend(
        self,
        query: Tensor,
        chosen: Chosen | LastChoice,
        slots: Tensor,
        cache: Tensor,
        columns: Columns,
        heads: LatentShape,
        scale: float,
    ) -> Tensor:
        """query [t, heads, nope + rotary]; cache [blocks, page, line] has this step's latents, and gets the keys of their index.
        slots: where this step's tokens are in it; columns: those of the step, with the layer's block tables."""
        if isinstance(chosen, Chosen):
            begin = heads.rank + heads.rotary
            keep_keys(chosen.key, slots, cache, begin)
            self._choice = self._choose(chosen, cache, begin, columns)
        assert self._choice is not None
        best, counts = self._choice
        absorbed = heads.absorb(query)
        found = torch.empty_like(absorbed)
        num, num_heads = absorbed.shape[:2]
        tokens = torch.arange(num, dtype=torch.int32, device=query.device)
        at = Columns(tokens, counts - 1, tokens + 1, num, best)
        tile = decode_tile(num, num_heads, query.device)
        room = self._workspace.of(num, num_heads, tile.splits, heads.rank)
        lines = cache.flatten(0, 1)[:, None]  # pages of one token
        decode(absorbed, query, lines, at, scale, found, room, tile, heads.rotary)
        return heads.values(found)

    def _choose(self, chosen: Chosen, cache: Tensor, begin: int, columns: Columns) -> tuple[Tensor, Tensor]:
        """Slots int32 [t, topk] of the tokens that each query attends to, and how many there are."""
        num, page = len(chosen.query), cache.shape[1]
        width = columns.blocks.shape[1] * page
        topk = min(chosen.topk, width)
        rows, lengths = self._visible(columns)
        best = torch.empty(num, topk, dtype=torch.int32, device=cache.device)
        counts = torch.empty(num, dtype=torch.int32, device=cache.device)
        piece = min(num, max(1, MOST_SCORES // width))
        scores = torch.empty(piece, width, device=cache.device)
        for first in range(0, num, piece):
            some = slice(first, min(first + piece, num))
            of = scores[: some.stop - first]
            asks = chosen.query[some], chosen.weights[some]
            index_scores(*asks, cache, begin, columns.blocks, rows[some], lengths[some], of)
            select(of, columns.blocks, rows[some], lengths[some], page, best[some], counts[some])
        return best, counts

    def _visible(self, columns: Columns) -> tuple[Tensor, Tensor]:
        """The row of each token's block table, and the tokens that it sees; none where it is padding. Both int32 [t]."""
        if self._seen is None:
            positions = self._batch.positions
            tokens = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
            request = torch.searchsorted(columns.ends[: columns.n], tokens, right=True)
            rows = columns.rows[request.clamp(max=columns.n - 1)]
            lengths = torch.where(request < columns.n, positions + 1, 0)
            self._seen = rows.int().contiguous(), lengths.int()
        return self._seen
