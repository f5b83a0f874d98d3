"""Ops on a GPU: cuBLAS for products, fused Triton kernels for what stands between them.

A product of one row with a weight that is not too large: one Triton kernel does norm, product and gate. Of many rows: product and gate,
where that is faster.
"""

import torch
from torch import Tensor

from meshlm.kernels.embedding.kernel import embed
from meshlm.kernels.gate_up_silu import kernel as gate_up_silu
from meshlm.kernels.gemm import kernel as products
from meshlm.kernels.gemv.kernel import gemv, pays
from meshlm.kernels.norm import kernel as norms
from meshlm.kernels.rope_cache.kernel import rope_cache
from meshlm.kernels.silu_mul.kernel import silu_mul
from meshlm.kernels.small_m_gemm.kernel import shape_for, small_m_gemm
from meshlm.workers.batch import ForwardBatch, LayerCache
from meshlm.workers.layers.ops import AttentionShape, Composed


class TritonOps(Composed):
    """See `meshlm.workers.layers.ops.Ops`."""

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def embed(
        self, ids: Tensor, table: Tensor, norm: tuple[Tensor, float], following: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        return embed(ids, table, None if pays(following, ids.shape[0]) else norm)

    def embed_part(
        self, ids: Tensor, table: Tensor, rows: tuple[int, int], norm: tuple[Tensor, float]
    ) -> tuple[Tensor, Tensor | None]:
        return embed(ids, table, None, rows[0])

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        if pays(packed, x.shape[0]):
            return gemv(x, packed, bias)[0]
        return products.gemm(x, packed, bias)

    def part(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, stream: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Maybe [s, rows, outputs], parts that the norm behind it adds up; of many rows, added here."""
        if bias is None and x.is_contiguous():
            if (shape := shape_for(x.shape[0], *packed.shape, "parts")) is not None:
                return small_m_gemm(x, packed, shape, "parts"), stream
            if x.shape[0] >= products.ADDED_ROWS:
                return products.add_gemm(x, packed, stream), None
        return self.linear(x, packed, bias, outputs), stream

    def whole(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x if x.dim() == 2 else x.sum(dim=0).to(dtype)  # rounded before it is added, as the norm rounds it

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
        if pays(packed, x.shape[-2]) and not (gate and bias is not None):
            return gemv(x, packed, bias, norm=norm[0], residual=residual, eps=norm[1], gate=gate)
        rows, use = x.shape[-2], "gate" if gate else "product"
        if bias is None and (few := shape_for(rows, *packed.shape, use)) is not None:
            y, stream = self._normed(x, residual, norm)
            return small_m_gemm(y, packed, few, use), stream
        if gate and bias is None and (many := gate_up_silu.shape_for(rows, *packed.shape)) is not None:
            y, stream = self._normed(x, residual, norm)
            return gate_up_silu.gate_up_silu(y, packed, many), stream
        return super().norm_linear(x, residual, norm, packed, bias, outputs, gate=gate)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norms.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def rope_cache(
        self, qkv: Tensor, batch: ForwardBatch, table: Tensor, cache: LayerCache, heads: AttentionShape
    ) -> Tensor:
        return rope_cache(
            qkv,
            batch.positions,
            batch.slot_mapping,
            table,
            heads.norms,
            heads.eps,
            cache.keys,
            cache.values,
            heads.num_heads,
            cache.k_scale,
            cache.v_scale,
        )
