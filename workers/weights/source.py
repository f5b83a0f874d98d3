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


class Part:
    """Some rows (dim 0) or columns (dim 1) of a tensor."""

    def __init__(self, source: Source, dim: int, begin: int, end: int) -> None:
        self._source, self._dim, self._begin, self._end = source, dim, begin, end
        self.shape = (*source.shape[:dim], end - begin, *source.shape[dim + 1 :])
        self.dtype = source.dtype

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        if dim == self._dim:
            return self._source.part(dim, self._begin + begin, self._begin + end)
        return self._source.part(dim, begin, end).narrow(self._dim, self._begin, self._end - self._begin)

    def whole(self) -> Tensor:
        return self.part(self._dim, 0, self.shape[self._dim])


class ExpertRows:
    """Some rows of one expert's matrix, in a tensor that holds those of all experts."""

    def __init__(self, source: Source, expert: int, begin: int, end: int) -> None:
        self._source, self._expert, self._begin = source, expert, begin
        self.shape, self.dtype = (end - begin, *source.shape[2:]), source.dtype

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        return self.whole().narrow(dim, begin, end - begin)

    def whole(self) -> Tensor:
        matrix = self._source.part(0, self._expert, self._expert + 1)[0]
        return matrix[self._begin : self._begin + self.shape[0]]
