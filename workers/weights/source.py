"""What a tensor of a checkpoint is, before it is read."""

from typing import Protocol

from torch import Tensor


class Source(Protocol):
    """One tensor of a model."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        """Indices begin to end of dimension `dim`. ProcessFatal names a file that cannot be read."""
        ...

    def whole(self) -> Tensor:
        """The whole tensor, of whatever shape."""
        ...
