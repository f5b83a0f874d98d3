"""No dispatch: every rank that has experts of a layer has all tokens of the step, one rank alone or those of a tensor-parallel group.

Of a group each rank has a part of every expert, or all of some experts: either way its results are a term of the sum over the ranks
(`Kind.RANK`), which the norm behind adds up. For experts that take batches, rows are sorted by experts, with plain torch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from meshlm.workers.moe.fused_moe import (
    NOWHERE,
    ActivationFormat,
    Combined,
    Dispatched,
    Dispatcher,
    Quantisation,
    Quantise,
    Receiver,
    Routing,
    WeightAndReduce,
)
from meshlm.workers.partial_sum import Kind, PartialSum


def weighted_sum(out: Tensor, routing: Routing, left: WeightAndReduce) -> Tensor:
    """Contiguous results [m, k, hidden] of experts, of which `left` is to be done -> [m, hidden]."""
    if left is WeightAndReduce.DONE:
        return out
    values = out.masked_fill((routing.experts == NOWHERE)[:, :, None], 0.0)
    if left is WeightAndReduce.WEIGHTED_SUM:
        values = values.float() * routing.weights[:, :, None]
    return values.sum(dim=1, dtype=torch.float32).to(out.dtype)


def local_numbers(routing: Routing, first: int, count: int) -> Routing:
    """Numbers of experts as this rank counts its own, which begin at `first`."""
    mine = (routing.experts >= first) & (routing.experts < first + count)
    return routing._replace(experts=torch.where(mine, routing.experts - first, NOWHERE))


@dataclass(slots=True)
class NoDispatch:
    first: int  # of this rank's experts
    count: int
    num_experts: int
    kind: Kind = Kind.WHOLE  # of what it gives
    name: str = "none"
    format: ActivationFormat = ActivationFormat.CONTIGUOUS
    finishes: frozenset[WeightAndReduce] = frozenset(WeightAndReduce) - {WeightAndReduce.PARTS}
    quantisations: frozenset[Quantisation] = frozenset(Quantisation)

    @property
    def overlapped(self) -> bool:
        return False

    def most_tokens(self, tokens: int) -> int:
        return tokens

    def prepare_async(self, x: Tensor, routing: Routing, quantise: Quantise) -> Receiver:
        values, scales = quantise(x)
        if self.count < self.num_experts:
            routing = local_numbers(routing, self.first, self.count)
        given = Dispatched(values, scales, routing, None)
        return lambda: given

    def combine_async(self, out: Tensor, given: Dispatched, routing: Routing, left: WeightAndReduce) -> Combined:
        assert given.routing is not None
        if left is WeightAndReduce.PARTS:
            parts = PartialSum(out, Kind.SPLIT_K)
            return lambda: parts
        whole = PartialSum(weighted_sum(out, given.routing, left), self.kind)
        return lambda: whole


@dataclass(slots=True)
class NoDispatchBatched(NoDispatch):
    """The same as batches: each expert has room for all tokens. What dispatchers of this format are compared with."""

    name: str = "none, batched"
    format: ActivationFormat = ActivationFormat.BATCHED
    finishes: frozenset[WeightAndReduce] = frozenset((WeightAndReduce.WEIGHTED_SUM,))

    def _places(self, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
        """Finds those of [m, k] that are of this rank's experts; of each its expert, and its row there, in the order of tokens."""
        local = local_numbers(routing, self.first, self.count).experts.long()
        mine = local >= 0
        chosen = torch.nn.functional.one_hot(local.clamp(min=0), self.count) * mine[:, :, None]  # [m, k, count]
        before = chosen.sum(dim=1).cumsum(dim=0) - chosen.sum(dim=1)  # [m, count]
        return mine, local.clamp(min=0), before.gather(1, local.clamp(min=0))

    def prepare_async(self, x: Tensor, routing: Routing, quantise: Quantise) -> Receiver:
        values, scales = quantise(x)
        mine, local, row = self._places(routing)
        most = self.most_tokens(len(x))
        place = torch.where(mine, local * most + row, self.count * most).flatten()  # behind the last: dropped

        def batched(lines: Tensor) -> Tensor:
            out = torch.zeros(self.count * most + 1, lines.shape[1], dtype=lines.dtype, device=lines.device)
            out[place] = lines.repeat_interleave(routing.experts.shape[1], dim=0)
            return out[:-1].view(self.count, most, -1)

        counts = torch.zeros(self.count, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, local.flatten(), mine.flatten().to(torch.int32))
        given = Dispatched(batched(values), None if scales is None else batched(scales), None, counts)
        return lambda: given

    def combine_async(self, out: Tensor, given: Dispatched, routing: Routing, left: WeightAndReduce) -> Combined:
        mine, local, row = self._places(routing)
        lines = out[local, row]  # [m, k, hidden]
        kept = Routing(torch.where(mine, routing.experts, NOWHERE), routing.weights)
        whole = PartialSum(weighted_sum(lines, kept, left), self.kind)
        return lambda: whole


class InBatches:
    """See `meshlm.workers.moe.fused_moe.Dispatcher`. Each of this worker's experts has room for all rows that come."""

    format = ActivationFormat.BATCHED
    finishes = frozenset((WeightAndReduce.WEIGHTED_SUM,))

    def __init__(self, rows: Dispatcher, num_experts: int) -> None:
        """num_experts: of this worker."""
        self.name, self.quantisations = f"{rows.name}, batched", rows.quantisations
        self._rows, self._sort = rows, NoDispatchBatched(0, num_experts, num_experts)

    @property
    def overlapped(self) -> bool:
        return self._rows.overlapped

    def most_tokens(self, tokens: int) -> int:
        return self._rows.most_tokens(tokens)

    def prepare_async(self, x: Tensor, routing: Routing, quantise: Quantise) -> Receiver:
        receive = self._rows.prepare_async(x, routing, quantise)

        def received() -> Dispatched:
            rows = receive()
            assert rows.routing is not None
            sorted_rows = self._sort.prepare_async(rows.x, rows.routing, lambda x: (x, rows.scales))()
            return sorted_rows._replace(rows=rows)

        return received

    def combine_async(self, out: Tensor, given: Dispatched, routing: Routing, left: WeightAndReduce) -> Combined:
        assert given.rows is not None and given.rows.routing is not None  # noqa: PT018
        sums = self._sort.combine_async(out, given, given.rows.routing, left)().value
        return self._rows.combine_async(sums, given.rows, routing, WeightAndReduce.DONE)
