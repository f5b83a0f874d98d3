"""A dispatcher of contiguous rows, for experts that take batches: what has come is sorted by experts before they compute it."""

from torch import Tensor

from meshlm.workers.moe.dispatch.none import NoDispatchBatched
from meshlm.workers.moe.parts import (
    ActivationFormat,
    Combined,
    Dispatched,
    Dispatcher,
    Quantise,
    Receiver,
    Routing,
    WeightAndReduce,
)


class InBatches:
    """See `meshlm.workers.moe.parts.Dispatcher`. Each of this worker's experts has room for all rows that come."""

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
