"""The operations that a model is made of, behind one interface: plain torch here, faster ones per device beside it.

A model never asks on which device it runs; `make_ops` does, once.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.gated_norm.reference import gated_norm
from meshlm.kernels.moe_routing.reference import Rule, select_experts
from meshlm.kernels.moe_slots.reference import slots_of
from meshlm.kernels.silu_mul.reference import ACTIVATIONS
from meshlm.workers.batch import LayerCache, StepInputs
from meshlm.workers.formats.format import has_kernels
from meshlm.workers.layers.rope import apply_rope, apply_rope_to_neighbours
from meshlm.workers.partial_sum import Kind, PartialSum

if TYPE_CHECKING:
    from meshlm.workers.lora.step_adapters import StepAdapters


@dataclass(slots=True)
class AttentionShape:
    """The shape of an attention layer, for backends and rope_cache. softcap and what follows: see kernels/attention/seen.py."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norms: tuple[Tensor, Tensor] | None  # the weights of the norms of query and key heads
    eps: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    chunk: int = 0
    slopes: Tensor | None = None


NormWeight = tuple[Tensor, float]
"""A norm's weight, and its epsilon."""
HeadProducts = Callable[[Tensor, Tensor | None], Tensor]
"""[t, heads, inputs] -> [t, heads, outputs], each head with a weight of its own; into the second tensor, if there is one."""


class LatentShape:
    """The facts that backends and latent_cache need of a layer of multi-head latent attention (kernels/mla/kernel.py)."""

    __slots__ = ("_absorb", "_values", "nope", "norm", "num_heads", "rank", "rotary", "up", "wide")

    def __init__(self, up: Tensor, sizes: tuple[int, int, int], norm: NormWeight, ops: "Ops") -> None:
        """up [heads (nope + wide), rank]: from a latent to the keys and values of all heads. sizes: nope, rotary, wide."""
        self.nope, self.rotary, self.wide = sizes
        self.up, self.rank, self.norm = up, up.shape[1], norm  # of the latent: weight and eps
        by_head = up.view(-1, self.nope + self.wide, self.rank)
        self.num_heads = by_head.shape[0]
        self._absorb = ops.head_products(by_head[:, : self.nope].transpose(1, 2))
        self._values = ops.head_products(by_head[:, self.nope :])

    def absorb(self, query: Tensor) -> Tensor:
        """query [t, heads, nope + rotary] -> W_UK^T of its first part [t, heads, rank], which is multiplied with latents."""
        return self._absorb(query[..., : self.nope], None)

    def values(self, found: Tensor, out: Tensor | None = None) -> Tensor:
        """Weighted sums of latents [t, heads, rank] -> those of values [t, heads, wide]."""
        return self._values(found, out)


class LayerStep(NamedTuple):
    """The inputs of one layer's attention in a step beside the layer's tensors."""

    ops: "Ops"
    batch: StepInputs
    table: Tensor  # cosines and sines by position (layers/rope.py); empty where an encoder does not rotate
    cache: LayerCache


class RouterWeights(NamedTuple):
    packed: Tensor  # [experts, hidden]
    bias: Tensor | None
    correction_bias: Tensor | None
    rule: Rule
    num_experts: int


class Ops(Protocol):
    """m rows, t tokens."""

    adapters: "StepAdapters | None"  # of the rows of a step, where some have any: `with_adapters`

    def pack(self, weight: Tensor) -> Tensor:
        """A weight [outputs, inputs] as this device likes it; what `linear` takes."""

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
        """[m, inputs] -> [m, outputs]."""

    def linear_into(self, x: Tensor, packed: Tensor, out: Tensor) -> Tensor:
        """[m, inputs] -> out [m, outputs], of a weight that is not packed (GPU)."""

    def rows(self, ids: Tensor, table: Tensor, size: int) -> Tensor:
        """Rows [t, size] of a table, which may be packed."""

    def row_parallel_linear(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, residual: Tensor | None
    ) -> PartialSum:
        """A product of which several ranks may have a part of the inputs each, to be added to the residual. It may be in the
        residual already; without one it stays the product alone."""

    def term(self, x: Tensor, residual: Tensor | None) -> PartialSum:
        """A row-parallel product that was computed by other means than `row_parallel_linear`."""

    def finish_sum(self, x: PartialSum, dtype: torch.dtype) -> Tensor:
        """The sum [m, n] of this dtype, without the residual that it is to be added to."""

    def embed(
        self, ids: Tensor, table: Tensor, norm: NormWeight, following: Tensor
    ) -> tuple[PartialSum, Tensor | None]:
        """Rows [t, hidden] of the table; and their norm, unless the product with the weight `following` brings that along."""

    def embed_part(
        self, ids: Tensor, table: Tensor, rows: tuple[int, int], norm: NormWeight
    ) -> tuple[PartialSum, Tensor | None]:
        """The same where this rank has the rows of ids from rows[0] up to before rows[1], other ranks the rest: zeros for those."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight (Zhang and Sennrich 2019); statistics in float32."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x [m, n], or the sum over s of x [s, m, n], in place; the norm of that."""

    def gated_norm(
        self, y: Tensor, gate: Tensor, weight: Tensor | None, eps: float, group: int, *, before: bool
    ) -> Tensor:
        """y, gate [m, n] -> [m, n]: kernels/gated_norm."""

    def act_mul(self, gate_up: Tensor, act: str) -> Tensor:
        """[m, 2n] -> act(first half) * second half. act: one of ACTIVATIONS (kernels/silu_mul)."""

    def own_norm(self, x: PartialSum, residual: Tensor, norm: NormWeight) -> PartialSum:
        """The norm of the sum alone, to be added to the residual. x has none yet."""

    def norm(self, x: PartialSum, norm: NormWeight) -> tuple[Tensor, Tensor]:
        """rms_norm of the sum and its residual together; and the new residual, which may be the old one, overwritten."""

    def norm_linear(
        self, x: PartialSum, norm: NormWeight, packed: Tensor, bias: Tensor | None, outputs: int, *, gate: str = ""
    ) -> tuple[Tensor, Tensor]:
        """linear of `norm`; and the new residual. norm: its weight and eps. outputs: rows of the weight. gate: act_mul with it
        follows; empty: nothing does."""

    def select_experts(
        self, logits: Tensor, rule: Rule, correction_bias: Tensor | None, slots: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The experts of m tokens, int32 [m, k], and their weights, float32 [m, k]: kernels/moe_routing."""

    def slots_of(self, experts: Tensor, table: Tensor, counts: Tensor, first: int) -> Tensor:
        """Gives the slots of experts that move between ranks: kernels/moe_slots."""

    def norm_route(
        self, x: PartialSum, norm: NormWeight, router: RouterWeights, slots: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`norm`: what it gives and the new residual; select_experts of the product of the first with the router's weight."""

    def rope_cache(
        self, qkv: Tensor, batch: StepInputs, table: Tensor, cache: LayerCache, heads: AttentionShape
    ) -> Tensor:
        """Norm (if any) and rotate query and key heads, write keys and values to the cache; query [t, heads, d]. On a GPU the keys
        in qkv are rotated in place too: attention over this step's own tokens reads them there."""

    def head_products(self, weights: Tensor) -> HeadProducts:
        """weights [heads, outputs, inputs], which may be strided."""

    def latent_cache(
        self, query: Tensor, latent: Tensor, batch: StepInputs, table: Tensor, cache: LayerCache, heads: LatentShape
    ) -> None:
        """Norm the latent, rotate its key and the heads of the query, in place; and write the latent's line to the cache. query [t,
        heads, nope + rotary]; latent [t, rank + rotary]. Lines of both may be strided."""


def with_adapters(ops: Ops, adapters: "StepAdapters | None") -> Ops:
    """The operations as the layers of a step with these adapters are given them."""
    if adapters is None:
        return ops
    found = copy(ops)
    found.adapters = adapters
    return found


class Composed:
    """embed and norm_linear by their parts; activations in plain torch."""

    adapters: "StepAdapters | None" = None

    gated_norm = staticmethod(gated_norm)
    select_experts = staticmethod(select_experts)
    slots_of = staticmethod(slots_of)

    def linear_into(self, x: Tensor, packed: Tensor, out: Tensor) -> Tensor:
        return torch.mm(x, packed.t(), out=out)

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
        angles = table[batch.rope_lines].to(qkv.dtype)
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


def make_invariant_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """Those of --deterministic: no row depends on others. On a CPU none ever does."""
    if device.type == "cpu":
        return make_ops(device, dtype)
    from meshlm.workers.layers.invariant_ops import InvariantOps

    return InvariantOps()
