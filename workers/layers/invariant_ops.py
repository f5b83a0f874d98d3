"""Ops on a GPU with --deterministic: a row's numbers are the same to the last bit, however many rows are computed beside it.

One kernel for all products, whose sums have an order of the weight's own, and of every other operation one variant for all numbers of
rows, each row by itself. Nothing is fused that is fused for some numbers of rows alone.
"""

from torch import Tensor

from meshlm.kernels import pdl
from meshlm.kernels.batch_invariant.gemm import gemm
from meshlm.kernels.embedding.kernel import embed
from meshlm.kernels.moe_routing.kernel import select_experts
from meshlm.kernels.norm import kernel as norms
from meshlm.kernels.rope_cache.kernel import rope_cache
from meshlm.kernels.silu_mul.kernel import act_mul
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.layers.ops import AttentionShape, Composed, NormWeight
from meshlm.workers.partial_sum import PartialSum

ACT_BLOCK = 1024  # columns of a program of the gate


class InvariantOps(Composed):
    select_experts = staticmethod(select_experts)

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def rows(self, ids: Tensor, table: Tensor, size: int) -> Tensor:
        return embed(ids, table)[0]

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        return gemm(x, packed, bias)

    def linear_into(self, x: Tensor, packed: Tensor, out: Tensor) -> Tensor:
        return gemm(x, packed, out=out)

    def norm_linear(
        self, x: PartialSum, norm: NormWeight, packed: Tensor, bias: Tensor | None, outputs: int, *, gate: str = ""
    ) -> tuple[Tensor, Tensor]:
        if gate == "silu" and bias is None:
            y, residual = self.norm(x, norm)
            return gemm(y, packed, gate=True), residual
        return super().norm_linear(x, norm, packed, bias, outputs, gate=gate)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x, weight, eps, options=pdl.options(x))

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.add_rms_norm(x, residual, weight, eps, options=pdl.options(x))

    def act_mul(self, gate_up: Tensor, act: str) -> Tensor:
        return act_mul(gate_up, act, ACT_BLOCK)

    def rope_cache(
        self, qkv: Tensor, batch: StepInputs, table: Tensor, cache: LayerCache, heads: AttentionShape
    ) -> Tensor:
        return rope_cache(
            qkv, batch.rope_lines, batch.slot_mapping[cache.group], table, heads.norms, heads.eps,
            cache.keys, cache.values, heads.num_heads, cache.k_scale, cache.v_scale,
        )  # fmt: skip
