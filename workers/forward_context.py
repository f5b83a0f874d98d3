"""What every layer of a step is given alike. The model makes one at the start of each step."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from meshlm.workers.attention.backend import StepAttention
from meshlm.workers.batch import StepInputs
from meshlm.workers.layers.ops import Ops, with_adapters


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The inputs of a step, and the ways in which its layers compute. A layer's own cache goes beside it."""

    batch: StepInputs
    rope: Tensor  # the model's cosines and sines by position (layers/rope.py); a layer may have a table of its own
    attention: StepAttention
    ops: Ops

    @classmethod
    def of(cls, batch: StepInputs, rope: Tensor, attention: StepAttention, ops: Ops) -> Self:
        """With the operations of a model, which are to add what the adapters of the step's rows do."""
        return cls(batch, rope, attention, with_adapters(ops, batch.adapters))
