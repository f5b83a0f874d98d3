"""Ops on a GPU: cuBLAS for products, fused Triton kernels for what stands between them.

A product of one row with a weight that is not too large: one Triton kernel does norm, product and gate. Of many rows: product and gate,
where that is faster.
"""

import torch
from torch import Tensor

from meshlm.kernels.embedding.kernel import embed
from meshlm.kernels.gate_up_silu import kernel as gate_up_silu
from meshlm.kernels.gated_norm.kernel import gated_norm
from meshlm.kernels.gemm import kernel as products
from meshlm.kernels.gemv.kernel import gemv, pays
from meshlm.kernels.mla.cache import latent_cache
from meshlm.kernels.moe_routing import fused as fused_routing
from meshlm.kernels.moe_routing.kernel import select_experts
from meshlm.kernels.moe_slots.kernel import slots_of
from meshlm.kernels.moe_sum.kernel import sum_parts
from meshlm.kernels.norm import kernel as norms
from meshlm.kernels.rope_cache.kernel import rope_cache
from meshlm.kernels.silu_mul.kernel import act_mul
from meshlm.kernels.small_m_gemm.kernel import shape_for, small_m_gemm
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.layers.ops import AttentionShape, Composed, LatentShape, NormWeight, RouterWeights
from meshlm.workers.partial_sum import Kind, PartialSum


class TritonOps(Composed):
    rms_norm = staticmethod(norms.rms_norm)
    add_rms_norm = staticmethod(norms.add_rms_norm)
    act_mul = staticmethod(act_mul)
    gated_norm = staticmethod(gated_norm)
    select_experts = staticmethod(select_experts)
    slots_of = staticmethod(slots_of)

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def rows(self, ids: Tensor, table: Tensor, size: int) -> Tensor:
        """Gathers by the kernel: while kernels are compiled ahead, nobody has written the ids, and torch would stop at what stands
        there."""
        return embed(ids, table)[0]

    def embed(
        self, ids: Tensor, table: Tensor, norm: NormWeight, following: Tensor
    ) -> tuple[PartialSum, Tensor | None]:
        found, normed = embed(ids, table, None if pays(following, ids.shape[0]) else norm)
        return PartialSum(found), normed

    def embed_part(
        self, ids: Tensor, table: Tensor, rows: tuple[int, int], norm: NormWeight
    ) -> tuple[PartialSum, Tensor | None]:
        return PartialSum(embed(ids, table, None, rows[0])[0], Kind.RANK), None

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        if pays(packed, x.shape[0]):
            return gemv(x, packed, bias)[0]
        return products.gemm(x, packed, bias)

    def row_parallel_linear(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, residual: Tensor | None
    ) -> PartialSum:
        """The product of few rows may be split along K, for the norm behind it; that of many rows is in the residual already."""
        if bias is None and x.is_contiguous():
            if (shape := shape_for(x.shape[0], *packed.shape, "parts")) is not None:
                return PartialSum(small_m_gemm(x, packed, shape, "parts"), Kind.SPLIT_K, residual)
            if residual is not None and x.shape[0] >= products.ADDED_ROWS:
                return PartialSum(products.add_gemm(x, packed, residual))
        return PartialSum(self.linear(x, packed, bias, outputs), Kind.WHOLE, residual)

    def finish_sum(self, x: PartialSum, dtype: torch.dtype) -> Tensor:
        """Rounded before it is added, as the norm rounds it."""
        found = x.value
        if x.kind is Kind.SPLIT_K:
            found = sum_parts(found, torch.empty(found.shape[1:], dtype=dtype, device=found.device))
        return found if x.own_norm is None else norms.rms_norm(found, *x.own_norm)

    def own_norm(self, x: PartialSum, residual: Tensor, norm: NormWeight) -> PartialSum:
        """Left to the norm behind, whose kernel takes both."""
        return x._replace(residual=residual, own_norm=norm)

    def norm(self, x: PartialSum, norm: NormWeight) -> tuple[Tensor, Tensor]:
        if x.own_norm is None:
            return super().norm(x, norm)
        assert x.residual is not None
        return norms.add_rms_norm(x.value, x.residual, *norm, x.own_norm), x.residual

    def norm_linear(
        self, x: PartialSum, norm: NormWeight, packed: Tensor, bias: Tensor | None, outputs: int, *, gate: str = ""
    ) -> tuple[Tensor, Tensor]:
        rows, by_silu = x.value.shape[-2], gate == "silu"
        use = "gate" if by_silu else "product"
        if x.kind is Kind.WHOLE and pays(packed, rows) and not (gate and bias is not None):
            return gemv(
                x.value, packed, bias, norm=norm[0], residual=x.residual, eps=norm[1], own=x.own_norm, gate=gate
            )
        if bias is None and (few := shape_for(rows, *packed.shape, use)) is not None:
            y, residual = self.norm(x, norm)
            out = small_m_gemm(y, packed, few, use)
            return (self.act_mul(out, gate) if gate and not by_silu else out), residual
        if by_silu and bias is None and (many := gate_up_silu.shape_for(rows, *packed.shape)) is not None:
            y, residual = self.norm(x, norm)
            return gate_up_silu.gate_up_silu(y, packed, many), residual
        return super().norm_linear(x, norm, packed, bias, outputs, gate=gate)

    def norm_route(
        self, x: PartialSum, norm: NormWeight, router: RouterWeights, slots: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Norm and routing are one kernel where there are few rows; of some more the choice adds up parts of the product."""
        added = x.kind is Kind.WHOLE or (x.kind is Kind.SPLIT_K and x.residual is not None)
        if router.bias is None and added and x.own_norm is None and fused_routing.takes(x.value):
            return fused_routing.norm_route(
                x.value, x.residual, norm, router.packed, router.rule, router.correction_bias, slots
            )
        if router.bias is None and (shape := shape_for(x.value.shape[-2], *router.packed.shape, "parts")) is not None:
            y, residual = self.norm(x, norm)
            logits = small_m_gemm(y, router.packed, shape, "parts")
            return y, residual, *select_experts(logits, router.rule, router.correction_bias, slots)
        return super().norm_route(x, norm, router, slots)

    def rope_cache(
        self, qkv: Tensor, batch: StepInputs, table: Tensor, cache: LayerCache, heads: AttentionShape
    ) -> Tensor:
        return rope_cache(
            qkv, batch.rope_lines, batch.slot_mapping[cache.group], table, heads.norms, heads.eps,
            cache.keys, cache.values, heads.num_heads, cache.k_scale, cache.v_scale,
        )  # fmt: skip

    def latent_cache(
        self, query: Tensor, latent: Tensor, batch: StepInputs, table: Tensor, cache: LayerCache, heads: LatentShape
    ) -> None:
        lines = cache.keys.squeeze(2)
        latent_cache(query, latent, batch.positions, batch.slot_mapping[cache.group], table, heads.norm, lines)
