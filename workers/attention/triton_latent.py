"""Multi-head latent attention by the Triton kernels (kernels/mla).

Decodes are absorbed, and so is everything in a CUDA graph of any mix of requests. Otherwise the tokens of a step's prompts see one
another projected up, where there are enough of them, and what earlier steps have cached absorbed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.mla import dense
from meshlm.kernels.mla.decode import decode
from meshlm.kernels.mla.prefill import prefill
from meshlm.kernels.mla.tiles import decode_tile, most_parts
from meshlm.workers.attention.aux_stream import AuxStream
from meshlm.workers.batch import UNKNOWN, StepInputs
from meshlm.workers.layers.ops import LatentShape

DENSE_FROM = 192
"""Tokens of prompts in a step from which on projecting them up pays."""


class LatentWorkspace:
    """Room for the parts of split contexts, shared by all layers and steps. CUDA graphs keep its address: it has its final size after
    the first decode."""

    def __init__(self, device: torch.device) -> None:
        self._flat = torch.empty(0, device=device)

    def of(self, requests: int, heads: int, splits: int, rank: int) -> tuple[Tensor, Tensor]:
        """Sums [requests, heads, splits, rank], maxima and weights [.., 2], flat."""
        most = most_parts(heads, self._flat.device) * heads
        if self._flat.numel() < most * (rank + 2):
            self._flat = torch.empty(most * (rank + 2), device=self._flat.device)
        used = requests * heads * splits if splits > 1 else 0
        assert used <= most
        return self._flat[: used * rank], self._flat[used * rank :]


class TritonLatentAttention:
    """One step."""

    def __init__(self, batch: StepInputs, workspace: LatentWorkspace, side: AuxStream) -> None:
        assert batch.columns is not None
        self._batch, self._columns, self._workspace, self._side = batch, batch.columns, workspace, side

    def attend(
        self, query: Tensor, latent: Tensor, cache: Tensor, columns: Columns, heads: LatentShape, scale: float
    ) -> Tensor:
        """query [t, heads, nope + rotary], latent [t, rank + rotary], which are in the cache [blocks, page, rank + rotary] too.

        columns: those of the step, with the layer's block tables.
        """
        decodes = self._batch.num_decodes
        if decodes in (UNKNOWN, columns.n) or query.shape[0] - decodes < DENSE_FROM:
            return self._absorbed(query, cache, columns, heads, scale)
        up = F.linear(latent[:, : heads.rank], heads.up)
        if not dense.supported(query, latent, up, heads.wide, heads.rotary):
            return self._absorbed(query, cache, columns, heads, scale)
        out = torch.empty(query.shape[0], heads.num_heads, heads.wide, dtype=query.dtype, device=query.device)

        def prompts() -> None:
            prior = None if self._batch.fresh else self._context(query, cache, columns, heads, scale)
            dense.dense(query, latent, up, columns, scale, out, decodes, prior=prior)

        def few() -> None:
            heads.values(self._decoded(query[:decodes], cache, columns, decodes, heads, scale), out[:decodes])

        if decodes:
            self._side.both(few, prompts)
        else:
            prompts()
        return out

    def _absorbed(self, query: Tensor, cache: Tensor, columns: Columns, heads: LatentShape, scale: float) -> Tensor:
        """All requests over the cache."""
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
        """Those of the first `num` requests that have one token."""
        first = Columns(columns.rows, columns.starts, columns.ends, num, columns.blocks)
        tile = decode_tile(num, heads.num_heads, query.device)
        room = self._workspace.of(num, heads.num_heads, tile.splits, heads.rank)
        decode(absorbed, query, cache, first, scale, out, room, tile)

    def _context(
        self, query: Tensor, cache: Tensor, columns: Columns, heads: LatentShape, scale: float
    ) -> tuple[Tensor, Tensor]:
        """What prompts see of earlier steps: see `dense.dense`."""
        absorbed = heads.absorb(query)
        found = torch.empty_like(absorbed)
        sums = torch.empty(absorbed.shape[:2], device=query.device)
        prefill(absorbed, query, cache, columns, scale, found, self._batch.num_decodes, context=sums)
        return heads.values(found), sums
