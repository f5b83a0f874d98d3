"""Ops on a GPU: cuBLAS for products, fused Triton kernels for what stands between them."""

import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.norm import kernel as norm
from meshlm.kernels.rope_cache.kernel import rope_cache
from meshlm.kernels.silu_mul.kernel import silu_mul
from meshlm.workers.batch import ForwardBatch, LayerCache
from meshlm.workers.layers.ops import Heads


class TritonOps:
    """See `meshlm.workers.layers.ops.Ops`."""

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        return F.linear(x, packed, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)

    def rope_cache(self, qkv: Tensor, batch: ForwardBatch, table: Tensor, cache: LayerCache, heads: Heads) -> Tensor:
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
        )
