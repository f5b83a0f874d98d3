"""The ops of a worker whose products are parts of sums: the norm that follows such a product sums over the ranks first.

In a decoder each row-parallel product (o, down) is followed by the addition to the residual stream and a norm, so sum, addition and
norm are one operation here, and one kernel where the communicator has it; with one row not even that (distributed/symmetric.py).
"""

import torch
from torch import Tensor

from meshlm.workers.distributed.communicator import FUSED_ROWS, Communicator
from meshlm.workers.layers.ops import NormWeight, Ops, RouterWeights
from meshlm.workers.lora.step_adapters import StepAdapters
from meshlm.workers.partial_sum import Kind, PartialSum


class SummingOps:
    """See `meshlm.workers.layers.ops.Ops`. What the base gives as this rank's term becomes the sum over the ranks."""

    adapters: StepAdapters | None = None

    def __init__(self, base: Ops, comm: Communicator, *, whole: bool = True) -> None:
        """whole: all layers are here, so that a step ends with a norm."""
        self.base, self._comm = base, comm
        self._one_row = comm.one_row if whole else None
        self.pack, self.linear, self.linear_into, self.rms_norm = (
            base.pack,
            base.linear,
            base.linear_into,
            base.rms_norm,
        )
        self.act_mul, self.rows, self.add_rms_norm = base.act_mul, base.rows, base.add_rms_norm
        self.select_experts, self.latent_cache, self.rope_cache = (
            base.select_experts,
            base.latent_cache,
            base.rope_cache,
        )
        self.embed = base.embed
        self.head_products, self.gated_norm, self.slots_of = base.head_products, base.gated_norm, base.slots_of

    def row_parallel_linear(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, residual: Tensor | None
    ) -> PartialSum:
        if self._one_row is not None and residual is not None and x.shape[0] == 1:
            sent = self._one_row.send(x, packed, bias)
            if sent is not None:
                return PartialSum(sent, Kind.IN_FLIGHT, residual)
        return PartialSum(self.base.linear(x, packed, bias, outputs), Kind.RANK, residual)

    def term(self, x: Tensor, residual: Tensor | None) -> PartialSum:
        return PartialSum(x, Kind.RANK, residual)

    def finish_sum(self, x: PartialSum, dtype: torch.dtype) -> Tensor:
        match x.kind:
            case Kind.IN_FLIGHT:
                assert self._one_row is not None
                return self._one_row.receive(x.value)
            case Kind.RANK:
                return self._comm.all_reduce(x.value)
            case _:
                return self.base.finish_sum(x, dtype)

    def own_norm(self, x: PartialSum, residual: Tensor, norm: NormWeight) -> PartialSum:
        return self.base.own_norm(PartialSum(self.finish_sum(x, residual.dtype)), residual, norm)

    def embed_part(
        self, ids: Tensor, table: Tensor, rows: tuple[int, int], norm: NormWeight
    ) -> tuple[PartialSum, Tensor | None]:
        """All of it: the ranks' terms are summed, or in flight."""
        if self._one_row is not None and len(ids) == 1:
            return PartialSum(self._one_row.send_row(ids, table, rows[0]), Kind.IN_FLIGHT), None
        found, _ = self.base.embed_part(ids, table, rows, norm)
        if len(ids) <= FUSED_ROWS:
            residual = torch.zeros_like(found.value)
            normed = self._comm.allreduce_rmsnorm(found.value, residual, *norm)
            if normed is not None:
                return PartialSum(residual), normed
        return PartialSum(self._comm.all_reduce(found.value)), None

    def _fused_norm(self, x: PartialSum, norm: NormWeight) -> tuple[Tensor, Tensor] | None:
        """See `Ops.norm`, in one kernel with the sum. None: not for this size or here."""
        if x.kind is Kind.IN_FLIGHT:
            assert self._one_row is not None
            residual = torch.zeros_like(x.value) if x.residual is None else x.residual  # of the step's first layer
            return self._one_row.norm(x.value, residual, *norm), residual
        if x.kind is Kind.RANK and x.residual is not None:
            normed = self._comm.allreduce_rmsnorm(x.value, x.residual, *norm)
            return None if normed is None else (normed, x.residual)
        return None

    def _summed(self, x: PartialSum) -> PartialSum:
        return x._replace(value=self._comm.all_reduce(x.value), kind=Kind.WHOLE) if x.kind is Kind.RANK else x

    def norm(self, x: PartialSum, norm: NormWeight) -> tuple[Tensor, Tensor]:
        found = self._fused_norm(x, norm)
        return self.base.norm(self._summed(x), norm) if found is None else found

    def norm_route(
        self, x: PartialSum, norm: NormWeight, router: RouterWeights, slots: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        found = self._fused_norm(x, norm)
        if found is None:
            return self.base.norm_route(self._summed(x), norm, router, slots)
        logits = self.base.linear(found[0], router.packed, router.bias, router.num_experts)
        return *found, *self.base.select_experts(logits, router.rule, router.correction_bias, slots)

    def norm_linear(
        self, x: PartialSum, norm: NormWeight, packed: Tensor, bias: Tensor | None, outputs: int, *, gate: str = ""
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.norm_linear`. Three ways to sum: in the product itself, in one kernel with the norm, before both."""
        if x.kind is Kind.IN_FLIGHT:
            assert self._one_row is not None
            found = self._one_row.norm_linear(x.value, x.residual, norm, packed, bias, gate=gate)
            if found is not None:
                return found
        fused = self._fused_norm(x, norm)
        if fused is None:
            return self.base.norm_linear(self._summed(x), norm, packed, bias, outputs, gate=gate)
        normed, residual = fused
        out = self.base.linear(normed, packed, bias, outputs)
        return (self.base.act_mul(out, gate) if gate else out), residual
