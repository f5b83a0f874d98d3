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
from meshlm.workers.moe.interfaces import (
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
from meshlm.workers.partial_sum import PartialSum

CHUNK = 16384
"""Rows that are computed at a time: what stands between gate and down is as large as this and no larger."""
ALIGNED = 256  # bytes


def refusal(dispatcher: Dispatcher, experts: Experts) -> str | None:
    """Why these two do not fit together; None: they do."""
    pair = f"dispatcher {dispatcher.name} and experts {experts.name} do not fit together"
    if dispatcher.format is not experts.format:
        return f"{pair}: it gives {dispatcher.format.value} activations, they take {experts.format.value} ones"
    if experts.quantisation not in dispatcher.quantisations:
        return f"{pair}: they want activations in {experts.quantisation.value}, which it does not send"
    if not _allowed(dispatcher, experts):
        leave = " or ".join(left.value for left in experts.leaves)
        return f"{pair}: they leave to be done: {leave}, which it does not do"
    return None


def _allowed(dispatcher: Dispatcher, experts: Experts) -> tuple[WeightAndReduce, ...]:
    return tuple(left for left in experts.leaves if left in dispatcher.finishes)


class FusedMoE:
    """ProcessFatal names two parts that do not fit together, and says why."""

    def __init__(self, dispatcher: Dispatcher, experts: Experts, chunk: int = CHUNK) -> None:
        why = refusal(dispatcher, experts)
        if why is not None:
            raise ProcessFatal(why)
        self.dispatcher, self.experts, self._chunk = dispatcher, experts, chunk
        self.allowed = _allowed(dispatcher, experts)

    def forward(
        self, x: Tensor, routing: Routing, meanwhile: Callable[[], PartialSum] | None = None
    ) -> tuple[PartialSum, PartialSum | None]:
        """The sum over each token's experts [m, hidden], without a residual; and what `meanwhile` gave while tokens travelled."""
        late = self.dispatcher.overlapped
        receive = self.dispatch(x, routing)
        beside = None if meanwhile is None or late else meanwhile()
        given = receive()
        combined = self.combine(self.compute(given), given, routing)
        if meanwhile is not None and late:
            beside = meanwhile()
        return combined(), beside

    def dispatch(self, x: Tensor, routing: Routing) -> Receiver:
        return self.dispatcher.prepare_async(x, routing, self.experts.quantise)

    def combine(self, out: Tensor, given: Dispatched, routing: Routing) -> Combined:
        return self.dispatcher.combine_async(out, given, routing, self.left(given))

    def left(self, given: Dispatched) -> WeightAndReduce:
        rows = given.x.shape[0]
        only_done = rows > self._chunk and WeightAndReduce.DONE in self.allowed  # parts of all chunks would lie apart
        num_topk = 0 if given.routing is None else given.routing.experts.shape[1]
        return self.experts.left(rows, num_topk, (WeightAndReduce.DONE,) if only_done else self.allowed)

    def compute(self, given: Dispatched) -> Tensor:
        assert given.format is self.experts.format
        left, rows, hidden = self.left(given), given.x.shape[0], given.x.shape[-1]
        num_topk = 0 if given.routing is None else given.routing.experts.shape[1]
        shape, dtype = tuple(given.x.shape), self.experts.dtype
        if left is WeightAndReduce.PARTS:
            shape, dtype = (num_topk, rows, hidden), torch.float32
        elif given.format is ActivationFormat.CONTIGUOUS and left is not WeightAndReduce.DONE:
            shape = (rows, num_topk, hidden)
        out = torch.empty(shape, dtype=dtype, device=given.x.device)
        if not self.experts.chunks or rows <= self._chunk:
            self._apply(given, out, num_topk, left)
            return out
        for begin in range(0, rows, self._chunk):
            end = min(begin + self._chunk, rows)
            self._apply(_rows(given, begin, end), out[begin:end], num_topk, left)
        return out

    def _apply(self, given: Dispatched, out: Tensor, num_topk: int, left: WeightAndReduce) -> None:
        shapes = self.experts.workspaces(tuple(given.x.shape), num_topk, left)
        self.experts.apply(given, out, workspaces(shapes, out.device), left)


def _rows(given: Dispatched, begin: int, end: int) -> Dispatched:
    assert given.routing is not None
    scales = None if given.scales is None else given.scales[begin:end]
    routing = Routing(given.routing.experts[begin:end], given.routing.weights[begin:end])
    return Dispatched(given.x[begin:end], scales, routing, None)


def workspaces(shapes: tuple[WorkspaceShape, ...], device: torch.device) -> tuple[Tensor, ...]:
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGNED) * ALIGNED)
    workspace = torch.empty(starts[-1], dtype=torch.uint8, device=device)
    return tuple(
        workspace[start : start + size].view(dtype).view(shape)
        for (shape, dtype), start, size in zip(shapes, starts, sizes, strict=False)
    )
