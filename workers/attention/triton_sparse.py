"""Latent attention to the tokens that an index chooses, by the Triton kernels (kernels/lightning_index, kernels/mla).

Each token of a step is computed as a request with one: scores of all tokens that it sees, the slots of the best, attention to those.
Shapes do not depend on what requests are, so any step may be in a CUDA graph.
"""

import torch
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.lightning_index.kernel import index_scores, keep_keys, select
from meshlm.kernels.mla.decode import decode
from meshlm.kernels.mla.tiles import decode_tile
from meshlm.workers.attention.sparse_latent import Chosen, LastChoice
from meshlm.workers.attention.triton_latent import LatentWorkspace
from meshlm.workers.batch import StepInputs
from meshlm.workers.layers.ops import LatentShape

MOST_SCORES = 1 << 24  # at a time: 64 MiB, of some queries with the longest context that there may be


class TritonSparseAttention:
    """One step."""

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

        slots: where this step's tokens are in it; columns: those of the step, with the layer's block tables.
        """
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
