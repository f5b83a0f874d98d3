"""Ops by the compiled CPU kernels (kernels/cpu): float32 only. Batch-invariant, as those are."""

from torch import Tensor

from meshlm.kernels.cpu import kernel
from meshlm.workers.batch import ForwardBatch, LayerCache
from meshlm.workers.layers.ops import Composed, Heads


def available() -> bool:
    """Whether the kernels could be compiled and loaded."""
    return kernel.library() is not None


class CpuOps(Composed):
    """See `meshlm.workers.layers.ops.Ops`."""

    def pack(self, weight: Tensor) -> Tensor:
        return kernel.pack(weight)

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        return kernel.linear(x, packed, bias, outputs)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return kernel.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return kernel.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return kernel.silu_mul(gate_up)

    def act_mul(self, gate_up: Tensor, act: str) -> Tensor:
        return kernel.act_mul(gate_up, act)

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
        return kernel.norm_linear(x, residual, *norm, packed, bias, outputs, gate)

    def rope_cache(self, qkv: Tensor, batch: ForwardBatch, table: Tensor, cache: LayerCache, heads: Heads) -> Tensor:
        return kernel.rope_cache(
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
