"""The parts that a mixture of experts is made of, and what they hand to one another.

    router      x [m, hidden]                    -> Routing: which experts each token goes to, and with which weights
    dispatcher  x, Routing                       -> Dispatched: the rows that this rank's experts compute (quantised and sent to them)
    experts     Dispatched                       -> their results (permute, gate and up, activation, down, unpermute)
    dispatcher  results, Routing                 -> PartialSum [m, hidden] of this rank's own tokens

Dispatchers and experts do more or less of the weighting and the sum over a token's experts (`WeightAndReduce`).
fused_moe.py puts a pair together, or says why it cannot. Nothing here waits for the
device, and every shape follows from the number of rows that go in: so a step with experts is a CUDA graph like any other.

A dispatcher and experts that fit together: a whole mixture of experts behind its router.

    dispatch(x, routing) -> receiver() -> compute(...) -> combine(...) -> receiver()

`forward` does them one behind the other, with the shared experts between sending and receiving; two micro-batches may interleave
the same steps. The workspaces of experts are parts of one buffer, which is given back when a layer is done, so all layers have the
same memory.
"""

import math
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshlm.kernels.moe_epilogue.reference import clamped_swiglu
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.formats.format import GroupedWeight
from meshlm.workers.partial_sum import PartialSum

NOWHERE = -1
"""In the place of an expert: the row does not go to one (padding, or an expert of another rank)."""
UNGATED_ACT = "relu2"
"""The activation of experts without a gate that kernels compute."""


class WeightAndReduce(Enum):
    """The work that is left to be done with the experts' results."""

    DONE = "done"
    """Nothing: [m, hidden]."""
    PARTS = "parts"
    """They are weighted; the sum is left to the norm behind it: float32 [k, m, hidden], zeros for NOWHERE."""
    SUM = "sum"
    """They are weighted; the sum over a row's experts is left: [m, k, hidden]."""
    WEIGHTED_SUM = "weighted sum"
    """Both: [m, k, hidden]."""


class Quantisation(Enum):
    """The form in which experts want activations to be sent to them: as they are, or 8-bit floats with scales."""

    NONE = "none"
    FP8_TOKEN = "fp8, a scale for each token"
    FP8_GROUP = "fp8, a scale for each group of inputs"
    INT8_TOKEN = "int8, a scale for each token"


class ExpertExtras(NamedTuple):
    """The extra parts of gpt-oss' experts beside two products and a silu gate: biases, and an activation. glu(gate, up) = (up + 1)
    gate sigmoid(alpha gate), where gate is at most `limit` and up between -limit and limit"""

    gate_up_bias: Tensor | None  # [local experts, 2 wide]
    down_bias: Tensor | None  # [local experts, hidden]
    swiglu: tuple[float, float] | None  # alpha, limit; None: the layer's activation

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        assert self.swiglu is not None
        alpha, limit = self.swiglu
        return clamped_swiglu(gate, up, alpha, limit)


class Routing(NamedTuple):
    experts: Tensor  # int32 [m, k], NOWHERE for padding
    weights: Tensor  # float32 [m, k]


class Dispatched(NamedTuple):
    """The rows that a dispatcher hands to the experts of this rank. Numbers of experts are local ones here."""

    x: Tensor  # [m, hidden], maybe 8-bit floats
    scales: Tensor | None  # float32 of x, where it is quantised: as x, but with one column for each group
    routing: Routing  # of the m rows; NOWHERE for experts of other ranks
    first: int = 0  # the number of the first row, where they are some of those that were handed over


class WorkspaceShape(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


Quantise = Callable[[Tensor], tuple[Tensor, Tensor | None]]
"""x [m, hidden] -> what is sent of it, and its scales."""
Receiver = Callable[[], Dispatched]
"""Waits, on the device's stream, until what was dispatched is there."""
Combined = Callable[[], PartialSum]
"""The same for results: a sum without a residual."""


class Dispatcher(Protocol):
    """Sends tokens to experts and results back. One for all layers of a model."""

    name: str
    finishes: frozenset[WeightAndReduce]
    """What experts may leave to `combine`."""
    quantisations: frozenset[Quantisation]
    """What it can send."""

    @property
    def overlapped(self) -> bool:
        """Whether another micro-batch computes while this one's rows travel: then what runs beside does so on their way back."""

    def prepare_async(self, x: Tensor, routing: Routing, quantise: Quantise) -> Receiver:
        """Quantise and begin to send; what is computed before the receiver is called runs meanwhile."""

    def combine_async(self, out: Tensor, given: Dispatched, routing: Routing, left: WeightAndReduce) -> Combined:
        """Begin to send results back to the tokens that `routing`, as given to prepare_async, is of."""


class ExpertWeights(NamedTuple):
    gate_up: GroupedWeight  # [local experts, 2 wide, hidden]; [.., wide, ..] where experts have no gate
    down: GroupedWeight  # [local experts, hidden, wide]
    act: str = "silu"
    extras: ExpertExtras | None = None
    gated: bool = True


class Experts(Protocol):
    """Computes this rank's experts. One for each layer, since it has the layer's weights."""

    name: str
    leaves: tuple[WeightAndReduce, ...]
    """What it may leave to the dispatcher; what it likes best comes first."""
    quantisation: Quantisation
    dtype: torch.dtype  # of the results

    def left(self, rows: int, num_topk: int, allowed: tuple[WeightAndReduce, ...]) -> WeightAndReduce:
        """The weighting and summing that it leaves to the dispatcher, for so many rows."""

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor | None]: ...

    def warm_rows(self, num_topk: int, most: int) -> set[int]:
        """So many rows, up to `most`, meet every variant of its kernels."""

    def workspaces(self, x: tuple[int, ...], num_topk: int, left: WeightAndReduce) -> tuple[WorkspaceShape, ...]:
        """The buffers that `apply` needs for activations of this shape."""

    def apply(self, given: Dispatched, out: Tensor, workspaces: tuple[Tensor, ...], left: WeightAndReduce) -> None:
        """Fill `out`, whose shape follows from `left`. A sum over experts has nothing of those that are NOWHERE; results of
        single ones that are need not be written: nobody reads them."""


CHUNK = 16384
"""Rows that are computed at a time: what stands between gate and down is as large as this and no larger."""
ALIGNED = 256  # bytes


def refusal(dispatcher: Dispatcher, experts: Experts) -> str | None:
    """Why these two do not fit together; None: they do."""
    pair = f"dispatcher {dispatcher.name} and experts {experts.name} do not fit together"
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
        num_topk = given.routing.experts.shape[1]
        return self.experts.left(rows, num_topk, (WeightAndReduce.DONE,) if only_done else self.allowed)

    def compute(self, given: Dispatched) -> Tensor:
        left, rows, hidden = self.left(given), given.x.shape[0], given.x.shape[-1]
        num_topk = given.routing.experts.shape[1]
        shape, dtype = tuple(given.x.shape), self.experts.dtype
        if left is WeightAndReduce.PARTS:
            shape, dtype = (num_topk, rows, hidden), torch.float32
        elif left is not WeightAndReduce.DONE:
            shape = (rows, num_topk, hidden)
        out = torch.empty(shape, dtype=dtype, device=given.x.device)
        if rows <= self._chunk:
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
    scales = None if given.scales is None else given.scales[begin:end]
    routing = Routing(given.routing.experts[begin:end], given.routing.weights[begin:end])
    return Dispatched(given.x[begin:end], scales, routing, given.first + begin)


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
