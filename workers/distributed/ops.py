"""The ops of a worker whose products are parts of sums: the norm that follows such a product sums over the ranks first.

In a decoder each row-parallel product (o, down) is followed by the addition to the residual stream and a norm, so sum, addition and
norm are one operation here, and one kernel where the communicator has it; with one row not even that (one_row.py).
"""

import torch
from torch import Tensor

from meshlm.workers.batch import ForwardBatch, LayerCache
from meshlm.workers.distributed.communicator import FUSED_ROWS, Communicator
from meshlm.workers.layers.ops import AttentionShape, Ops


class SummingOps:
    """See `meshlm.workers.layers.ops.Ops`. Where there is a residual, x is this rank's part of a sum."""

    def __init__(self, base: Ops, comm: Communicator, *, whole: bool = True) -> None:
        """whole: all layers are here, so that a step ends with a norm."""
        self.base, self._comm = base, comm
        self._one_row = comm.one_row if whole else None
        self.pack, self.linear, self.rms_norm, self.silu_mul = base.pack, base.linear, base.rms_norm, base.silu_mul
        self.act_mul, self.rows, self.whole = base.act_mul, base.rows, base.whole

    def part(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, stream: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        sent = self._one_row.send(x, packed, bias) if self._one_row is not None and x.shape[0] == 1 else None
        return (self.base.linear(x, packed, bias, outputs) if sent is None else sent), stream

    def embed(
        self, ids: Tensor, table: Tensor, norm: tuple[Tensor, float], following: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return self.base.embed(ids, table, norm, following)

    def embed_part(
        self, ids: Tensor, table: Tensor, rows: tuple[int, int], norm: tuple[Tensor, float]
    ) -> tuple[Tensor, Tensor | None]:
        """All of it: the ranks' parts are summed, or on their way (`part`)."""
        if self._one_row is not None and len(ids) == 1:
            return self._one_row.send_row(ids, table, rows[0]), None
        part, _ = self.base.embed_part(ids, table, rows, norm)
        if len(ids) <= FUSED_ROWS:
            stream = torch.zeros_like(part)
            normed = self._comm.allreduce_rmsnorm(part, stream, *norm)
            if normed is not None:
                return stream, normed
        return self._comm.all_reduce(part), None

    def rope_cache(
        self, qkv: Tensor, batch: ForwardBatch, table: Tensor, cache: LayerCache, heads: AttentionShape
    ) -> Tensor:
        return self.base.rope_cache(qkv, batch, table, cache, heads)

    def _allreduce_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        if self._one_row is not None and self._one_row.stands_for(x):
            return self._one_row.norm(x, residual, weight, eps)
        return self._comm.allreduce_rmsnorm(x, residual, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = self._allreduce_rmsnorm(x, residual, weight, eps)
        return self.base.add_rms_norm(self._comm.all_reduce(x), residual, weight, eps) if normed is None else normed

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: tuple[Tensor, float],
        packed: Tensor,
        bias: Tensor | None,
        outputs: int,
        *,
        gate: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.norm_linear`. Three ways to sum: in the product itself, in one kernel with the norm, before both."""
        base = self.base
        if self._one_row is not None and self._one_row.stands_for(x):
            found = self._one_row.norm_linear(x, residual, norm, packed, bias, gate=gate)
            if found is not None:
                return found
            if residual is None:  # the step's first layer: the sum alone is the stream
                residual = torch.zeros_like(x)
        elif residual is None:  # not a part of a sum
            return base.norm_linear(x, None, norm, packed, bias, outputs, gate=gate)
        normed = self._allreduce_rmsnorm(x, residual, *norm)
        if normed is None:
            return base.norm_linear(self._comm.all_reduce(x), residual, norm, packed, bias, outputs, gate=gate)
        out = base.linear(normed, packed, bias, outputs)
        return (base.silu_mul(out) if gate else out), residual
