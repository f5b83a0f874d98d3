"""A dispatcher and experts that fit together: a whole mixture of experts behind its router.

    dispatch(x, routing) -> receiver() -> compute(...) -> combine(...) -> receiver()

`forward` does them one behind the other, with the shared experts between sending and receiving; two micro-batches may interleave
the same steps. The workspaces of experts are parts of one buffer, which is given back when a layer is done, so all layers have the
same memory.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.layers.partial_sum import PartialSum
from meshlm.workers.moe.parts import (
    ActivationFormat,
    Combined,
    Dispatched,
    Dispatcher,
    Experts,
    Receiver,
    Routing,
    WeightAndReduce,
    WorkspaceShape,
)

CHUNK = 32768
"""Rows that are computed at a time: what stands between gate and down is as large as this and no larger."""
ALIGNED = 256  # bytes


def refusal(dispatcher: Dispatcher, experts: Experts) -> str | None:
    """Why these two do not fit together; None: they do."""
    pair = f"dispatcher {dispatcher.name} and experts {experts.name} do not fit together"
    if dispatcher.format is not experts.format:
        return f"{pair}: it gives {dispatcher.format.value} activations, they take {experts.format.value} ones"
    if experts.quantisation not in dispatcher.quantisations:
        return f"{pair}: they want activations in {experts.quantisation.value}, which it does not send"
    if _left(dispatcher, experts) is None:
        leave = " or ".join(left.value for left in experts.leaves)
        return f"{pair}: they leave to be done: {leave}, which it does not do"
    return None


def _left(dispatcher: Dispatcher, experts: Experts) -> WeightAndReduce | None:
    return next((left for left in experts.leaves if left in dispatcher.finishes), None)


class FusedMoE:
    """See the module docstring. ProcessFatal names two parts that do not fit together, and says why."""

    def __init__(self, dispatcher: Dispatcher, experts: Experts, chunk: int = CHUNK) -> None:
        why = refusal(dispatcher, experts)
        if why is not None:
            raise ProcessFatal(why)
        left = _left(dispatcher, experts)
        assert left is not None
        self.dispatcher, self.experts, self.left, self._chunk = dispatcher, experts, left, chunk

    def forward(
        self, x: Tensor, routing: Routing, meanwhile: Callable[[], PartialSum] | None = None
    ) -> tuple[PartialSum, PartialSum | None]:
        """The sum over each token's experts [m, hidden], without a residual; and what `meanwhile` gave while tokens travelled."""
        receive = self.dispatch(x, routing)
        beside = None if meanwhile is None else meanwhile()
        given = receive()
        return self.combine(self.compute(given), given, routing)(), beside

    def dispatch(self, x: Tensor, routing: Routing) -> Receiver:
        """See `Dispatcher.prepare_async`."""
        return self.dispatcher.prepare_async(x, routing, self.experts.quantise)

    def combine(self, out: Tensor, given: Dispatched, routing: Routing) -> Combined:
        """See `Dispatcher.combine_async`."""
        return self.dispatcher.combine_async(out, given, routing, self.left)

    def compute(self, given: Dispatched) -> Tensor:
        """The experts' results, of which `left` is still to be done."""
        assert given.format is self.experts.format
        rows, hidden = given.x.shape[0], given.x.shape[-1]
        num_topk = 0 if given.routing is None else given.routing.experts.shape[1]
        shape: tuple[int, ...] = tuple(given.x.shape)
        if given.format is ActivationFormat.CONTIGUOUS and self.left is not WeightAndReduce.DONE:
            shape = (rows, num_topk, hidden)
        out = torch.empty(shape, dtype=self.experts.dtype, device=given.x.device)
        each = min(rows, self._chunk) if self.experts.chunks and given.routing is not None else rows
        spaces = workspaces(self.experts.workspaces((each, *given.x.shape[1:]), num_topk), given.x.device)
        for begin in range(0, rows, max(1, each)):
            part = given if each == rows else _rows(given, begin, begin + each)
            self.experts.apply(part, out[begin : begin + each], spaces, self.left)
        return out


def _rows(given: Dispatched, begin: int, end: int) -> Dispatched:
    """Some of the rows of contiguous activations."""
    assert given.routing is not None
    scales = None if given.scales is None else given.scales[begin:end]
    routing = Routing(given.routing.experts[begin:end], given.routing.weights[begin:end])
    return Dispatched(given.x[begin:end], scales, routing, None)


def workspaces(shapes: tuple[WorkspaceShape, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Parts of one new buffer."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGNED) * ALIGNED)
    room = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    return tuple(
        room[start : start + size].view(dtype).view(shape)
        for (shape, dtype), start, size in zip(shapes, starts, sizes, strict=False)
    )
