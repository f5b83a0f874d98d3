"""What a way in which weights come has to do."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from meshlm.protocol.weight_transfer import TensorInfo, UpdateInfo


class TransferFailed(Exception):
    """Weights cannot be received, and why: the trainer is told, and the old weights serve."""


class WeightSource(Protocol):
    """Weights of one trainer. `receive` runs in a thread of its own; `abort` comes from another one."""

    def receive(self, info: UpdateInfo, tensors: tuple[TensorInfo, ...]) -> Iterator[tuple[list[TensorInfo], Tensor]]:
        """The tensors in their order, some at a time, with their bytes one after the other: [num_bytes] uint8. TransferFailed."""
        ...

    def has_trainer(self) -> bool:
        """Whether the trainer is there, as far as one can tell."""
        ...

    def abort(self) -> None:
        """Whatever `receive` waits for, it ends with TransferFailed; nothing can be received any more."""
        ...
