"""Ops by the compiled CPU kernels (kernels/cpu): float32, with weights that may be encoded. Batch-invariant, as those are."""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.cpu import kernel, packed
from meshlm.kernels.cpu.library import library
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.layers.ops import AttentionShape, Composed, HeadProducts, NormWeight
from meshlm.workers.partial_sum import PartialSum


def available() -> bool:
    return library() is not None


class CpuOps(Composed):
    linear = staticmethod(kernel.linear)
    rms_norm = staticmethod(kernel.rms_norm)
    add_rms_norm = staticmethod(kernel.add_rms_norm)
    act_mul = staticmethod(kernel.act_mul)

    def pack(self, weight: Tensor) -> Tensor:
        return weight if weight.dtype == torch.uint8 else packed.pack(weight)  # packed by the loader, or now

    def rows(self, ids: Tensor, table: Tensor, size: int) -> Tensor:
        return packed.rows(table, ids, size) if table.dtype == torch.uint8 else F.embedding(ids, table)

    def norm_linear(
        self, x: PartialSum, norm: NormWeight, packed: Tensor, bias: Tensor | None, outputs: int, *, gate: str = ""
    ) -> tuple[Tensor, Tensor]:
        by_silu = gate == "silu"
        out, residual = kernel.norm_linear(x.value, x.residual, *norm, packed, bias, outputs, by_silu)
        return (self.act_mul(out, gate) if gate and not by_silu else out), residual

    def rope_cache(
        self, qkv: Tensor, batch: StepInputs, table: Tensor, cache: LayerCache, heads: AttentionShape
    ) -> Tensor:
        slots, keys, values = batch.slot_mapping[cache.group], cache.keys, cache.values
        if cache.keys.dtype != qkv.dtype:  # the kernel writes numbers as they are: into lines of this step, then
            slots = torch.arange(len(qkv))
            keys, values = torch.empty(2, 1, len(qkv), *cache.keys.shape[2:])
        query = kernel.rope_cache(
            qkv, batch.rope_lines, slots, table, heads.norms, heads.eps, keys, values, heads.num_heads
        )
        if cache.keys.dtype != qkv.dtype:
            cache.write(batch.slot_mapping[cache.group], keys[0], values[0])
        return query

    def head_products(self, weights: Tensor) -> HeadProducts:
        """One product after the other: torch's of all heads at once depend on the number of rows."""
        packed, outputs = [self.pack(weight.contiguous()) for weight in weights], weights.shape[1]

        def products(x: Tensor, out: Tensor | None) -> Tensor:
            heads = zip(x.unbind(1), packed, strict=True)
            found = torch.stack(
                [self.linear(head.contiguous(), weight, None, outputs) for head, weight in heads], dim=1
            )
            return found if out is None else out.copy_(found)

        return products
