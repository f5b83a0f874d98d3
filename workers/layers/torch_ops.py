"""The operations of `Ops` in plain torch, correct on every device; and which a device gets (`make_ops`)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.gated_norm.reference import gated_norm
from meshlm.kernels.moe_routing.reference import select_experts
from meshlm.kernels.moe_slots.reference import slots_of
from meshlm.kernels.silu_mul.reference import ACTIVATIONS
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.formats.format import has_kernels
from meshlm.workers.layers.ops import AttentionShape, HeadProducts, LatentShape, NormWeight, Ops, RouterWeights
from meshlm.workers.layers.rope import apply_rope, apply_rope_to_neighbours
from meshlm.workers.partial_sum import Kind, PartialSum


class Composed:
    """embed and norm_linear by their parts; activations in plain torch."""

    gated_norm = staticmethod(gated_norm)
    select_experts = staticmethod(select_experts)
    slots_of = staticmethod(slots_of)

    def rows(self, ids: Tensor, table: Tensor, size: int) -> Tensor:
        return F.embedding(ids, table)

    def finish_sum(self, x: PartialSum, dtype: torch.dtype) -> Tensor:
        assert x.kind is Kind.WHOLE
        return x.value

    def row_parallel_linear(
        self: Ops, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, residual: Tensor | None
    ) -> PartialSum:
        return self.term(self.linear(x, packed, bias, outputs), residual)

    def term(self, x: Tensor, residual: Tensor | None) -> PartialSum:
        return PartialSum(x, Kind.WHOLE, residual)

    def own_norm(self: Ops, x: PartialSum, residual: Tensor, norm: NormWeight) -> PartialSum:
        return PartialSum(self.rms_norm(self.finish_sum(x, residual.dtype), *norm), residual=residual)

    def embed(
        self: Ops, ids: Tensor, table: Tensor, norm: NormWeight, following: Tensor
    ) -> tuple[PartialSum, Tensor | None]:
        return PartialSum(self.rows(ids, table, norm[0].shape[0])), None

    def embed_part(
        self: Ops, ids: Tensor, table: Tensor, rows: tuple[int, int], norm: NormWeight
    ) -> tuple[PartialSum, Tensor | None]:
        begin, end = rows
        inside = (ids >= begin) & (ids < end)
        found = self.rows(torch.where(inside, ids - begin, 0), table, norm[0].shape[0])
        return PartialSum(found.masked_fill_(~inside[:, None], 0.0), Kind.RANK), None

    def norm_route(
        self: Ops, x: PartialSum, norm: NormWeight, router: RouterWeights, slots: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y, residual = self.norm(x, norm)
        logits = self.linear(y, router.packed, router.bias, router.num_experts)
        return y, residual, *self.select_experts(logits, router.rule, router.correction_bias, slots)

    def act_mul(self, gate_up: Tensor, act: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[act](gate) * up

    def head_products(self, weights: Tensor) -> HeadProducts:
        transposed = weights.transpose(1, 2)

        def products(x: Tensor, out: Tensor | None) -> Tensor:
            if out is None:
                out = x.new_empty(*x.shape[:2], weights.shape[1])
            torch.bmm(x.transpose(0, 1), transposed, out=out.transpose(0, 1))
            return out

        return products

    def latent_cache(
        self: Ops,
        query: Tensor,
        latent: Tensor,
        batch: StepInputs,
        table: Tensor,
        cache: LayerCache,
        heads: LatentShape,
    ) -> None:
        cos, sin = table[batch.positions].to(query.dtype)[:, None].chunk(2, dim=-1)
        for x in (query, latent[:, None]):
            x[..., -heads.rotary :] = apply_rope_to_neighbours(x[..., -heads.rotary :], cos, sin)
        latent[:, : heads.rank] = self.rms_norm(latent[:, : heads.rank].contiguous(), *heads.norm)
        lines = cache.keys.flatten(0, 1)[..., : latent.shape[1]]
        lines.index_copy_(0, batch.slot_mapping[cache.group], latent[:, None])

    def norm(self: Ops, x: PartialSum, norm: NormWeight) -> tuple[Tensor, Tensor]:
        """Terms that are split along K are added up by `add_rms_norm`, where there are any."""
        if x.residual is None:
            assert x.kind is Kind.WHOLE
            return self.rms_norm(x.value, *norm), x.value
        return self.add_rms_norm(x.value, x.residual, *norm), x.residual

    def norm_linear(
        self: Ops, x: PartialSum, norm: NormWeight, packed: Tensor, bias: Tensor | None, outputs: int, *, gate: str = ""
    ) -> tuple[Tensor, Tensor]:
        y, residual = self.norm(x, norm)
        out = self.linear(y, packed, bias, outputs)
        del y  # its memory is part of what the gate's result gets
        return (self.act_mul(out, gate) if gate else out), residual


class TorchOps(Composed):
    """Plain torch: any device, any dtype."""

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        return F.linear(x, packed, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return _rms_norm(residual, weight, eps)

    def rope_cache(
        self, qkv: Tensor, batch: StepInputs, table: Tensor, cache: LayerCache, heads: AttentionShape
    ) -> Tensor:
        split = heads.num_heads + heads.num_kv_heads
        lines = qkv.view(qkv.shape[0], -1, heads.head_dim)
        both, value = lines[:, :split], lines[:, split:]
        if heads.norms is not None:
            query, key = both[:, : heads.num_heads], both[:, heads.num_heads :]
            query_norm, key_norm = heads.norms
            both = torch.cat((_rms_norm(query, query_norm, heads.eps), _rms_norm(key, key_norm, heads.eps)), dim=1)
        angles = table[batch.positions].to(qkv.dtype)
        half = angles.shape[1] // 2
        both = apply_rope(both, angles[:, None, :half], angles[:, None, half:])
        cache.write(batch.slot_mapping[cache.group], both[:, heads.num_heads :], value)
        return both[:, : heads.num_heads]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The weight may be float32 where x is not (Gemma): then the product is rounded once, at the end."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


def make_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    if device.type == "cpu" and dtype == torch.float32:
        from meshlm.workers.layers import cpu_ops

        if cpu_ops.available():
            return cpu_ops.CpuOps()
    if has_kernels(device, dtype):
        from meshlm.workers.layers.triton_ops import TritonOps

        return TritonOps()
    return TorchOps()
