"""What a tensor of a checkpoint is, before it is read."""

from typing import Protocol

import torch
from torch import Tensor

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


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


class Mapped:
    """A tensor over a mapped file: only the pages that are copied are read."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)
        self.dtype = (
            _DTYPES.get(tensor.dtype, str(tensor.dtype)) if tensor.layout == torch.strided else str(tensor.layout)
        )

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        return self._tensor.narrow(dim, begin, end - begin)

    def whole(self) -> Tensor:
        return self._tensor
