"""A dispatcher of contiguous rows, for experts that take batches: what has come is sorted by experts before they compute it."""

from dataclasses import dataclass

from torch import Tensor

from meshlm.workers.moe.dispatch.none import NoDispatchBatched
from meshlm.workers.moe.parts import (
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


@dataclass(frozen=True, slots=True)
class InBatches:
    """See `meshlm.workers.moe.parts.Dispatcher`. `count`: experts of this worker, each of which has room for all rows that come."""

    rows: Dispatcher
    count: int
    format: ActivationFormat = ActivationFormat.BATCHED
    finishes: frozenset[WeightAndReduce] = frozenset((WeightAndReduce.WEIGHTED_SUM,))

    @property
    def name(self) -> str:
        return f"{self.rows.name}, batched"

    @property
    def quantisations(self) -> frozenset[Quantisation]:
        return self.rows.quantisations

    @property
    def _sort(self) -> NoDispatchBatched:
        return NoDispatchBatched(0, self.count, self.count)

    def most_tokens(self, tokens: int) -> int:
        return self.rows.most_tokens(tokens)

    def prepare_async(self, x: Tensor, routing: Routing, quantise: Quantise) -> Receiver:
        receive = self.rows.prepare_async(x, routing, quantise)

        def received() -> Dispatched:
            rows = receive()
            assert rows.routing is not None
            sorted_rows = self._sort.prepare_async(rows.x, rows.routing, lambda x: (x, rows.scales))()
            return sorted_rows._replace(rows=rows)

        return received

    def combine_async(self, out: Tensor, given: Dispatched, routing: Routing, left: WeightAndReduce) -> Combined:
        assert given.rows is not None and given.rows.routing is not None  # noqa: PT018
        sums = self._sort.combine_async(out, given, given.rows.routing, left)().value
        return self.rows.combine_async(sums, given.rows, routing, WeightAndReduce.DONE)
