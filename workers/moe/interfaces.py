"""The parts that a mixture of experts is made of, and what they hand to one another.

    router      x [m, hidden]                    -> Routing: which experts each token goes to, and with which weights
    dispatcher  x, Routing                       -> Dispatched: the rows that this rank's experts compute (quantised and sent to them)
    experts     Dispatched                       -> their results (permute, gate and up, activation, down, unpermute)
    dispatcher  results, Routing                 -> PartialSum [m, hidden] of this rank's own tokens

Dispatchers and experts are written for one of two `ActivationFormat`s and do more or less of the weighting and the sum over a
token's experts (`WeightAndReduce`). fused_moe.py puts a pair together, or says why it cannot. Nothing here waits for the
device, and every shape follows from the number of rows that go in: so a step with experts is a CUDA graph like any other.
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshlm.kernels.moe_epilogue.reference import clamped_swiglu
from meshlm.workers.formats.format import GroupedWeight
from meshlm.workers.partial_sum import PartialSum

NOWHERE = -1
"""In the place of an expert: the row does not go to one (padding, or an expert of another rank)."""
UNGATED_ACT = "relu2"
"""The activation of experts without a gate that kernels compute."""


class ActivationFormat(Enum):
    """The form in which rows come to the experts."""

    CONTIGUOUS = "contiguous"
    """x [m, hidden], each row with the numbers of its experts."""
    BATCHED = "batched"
    """x [local experts, most tokens, hidden], and how many rows of each expert are real."""


class WeightAndReduce(Enum):
    """The work that is left to be done with the experts' results."""

    DONE = "done"
    """Nothing: contiguous [m, hidden]."""
    PARTS = "parts"
    """They are weighted; the sum is left to the norm behind it: contiguous float32 [k, m, hidden], zeros for NOWHERE."""
    SUM = "sum"
    """They are weighted; the sum over a row's experts is left: contiguous [m, k, hidden]."""
    WEIGHTED_SUM = "weighted sum"
    """Both: contiguous [m, k, hidden], batched [local experts, most tokens, hidden]."""


class Quantisation(Enum):
    """What experts want of activations before they are sent to them: as they are, or 8-bit floats with scales."""

    NONE = "none"
    FP8_TOKEN = "fp8, a scale for each token"
    FP8_GROUP = "fp8, a scale for each group of inputs"
    INT8_TOKEN = "int8, a scale for each token"


class ExpertExtras(NamedTuple):
    """What gpt-oss' experts have beside two products and a gate that is silu: biases, and its activation.

    glu(gate, up) = (up + 1) gate sigmoid(alpha gate), where gate is at most `limit` and up between -limit and limit
    """

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
    """What a dispatcher hands to the experts of this rank. Numbers of experts are local ones here."""

    x: Tensor  # [m, hidden] or [local experts, most tokens, hidden], maybe 8-bit floats
    scales: Tensor | None  # float32 of x, where it is quantised: as x, but with one column for each group
    routing: Routing | None  # contiguous: of the m rows; NOWHERE for experts of other ranks
    num_tokens: Tensor | None  # batched: int32 [local experts]
    rows: "Dispatched | None" = (
        None  # batched: the contiguous ones that were sorted, where a dispatcher still needs them
    )

    @property
    def format(self) -> ActivationFormat:
        return ActivationFormat.BATCHED if self.routing is None else ActivationFormat.CONTIGUOUS


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
    format: ActivationFormat
    finishes: frozenset[WeightAndReduce]
    """What experts may leave to `combine`."""
    quantisations: frozenset[Quantisation]
    """What it can send."""

    @property
    def overlapped(self) -> bool:
        """Whether another micro-batch computes while this one's rows travel: then what runs beside does so on their way back."""

    def most_tokens(self, tokens: int) -> int:
        """Batched: the rows that an expert may get of steps with so many tokens a rank; contiguous: the rows in all."""

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
    format: ActivationFormat
    leaves: tuple[WeightAndReduce, ...]
    """What it may leave to the dispatcher; what it likes best comes first."""
    quantisation: Quantisation
    dtype: torch.dtype  # of the results
    chunks: bool
    """Whether rows may be computed some at a time."""

    def left(self, rows: int, num_topk: int, allowed: tuple[WeightAndReduce, ...]) -> WeightAndReduce:
        """What it leaves of so many rows, of what the dispatcher does too."""

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor | None]: ...

    def warm_rows(self, num_topk: int, most: int) -> set[int]:
        """So many rows, up to `most`, meet every variant of its kernels."""

    def workspaces(self, x: tuple[int, ...], num_topk: int, left: WeightAndReduce) -> tuple[WorkspaceShape, ...]:
        """The buffers that `apply` needs for activations of this shape."""

    def apply(self, given: Dispatched, out: Tensor, workspaces: tuple[Tensor, ...], left: WeightAndReduce) -> None:
        """Fill `out`, whose shape follows from `left`. A sum over experts has nothing of those that are NOWHERE; results of
        single ones that are, and of batched rows that are not real, need not be written: nobody reads them."""
