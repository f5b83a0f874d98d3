"""What a tensor of a checkpoint is, before it is read."""

import torch
from torch import Tensor

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


class Source:
    """One tensor of a model. A kind of source has `part`, or `whole` where nothing less can be read."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        """Indices begin to end of dimension `dim`. ProcessFatal names a file that cannot be read."""
        return self.whole().narrow(dim, begin, end - begin)

    def whole(self) -> Tensor:
        """The whole tensor, of whatever shape."""
        return self.part(0, 0, self.shape[0])


class Mapped(Source):
    """A tensor over a mapped file: only the pages that are copied are read."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)
        self.dtype = (
            _DTYPES.get(tensor.dtype, str(tensor.dtype)) if tensor.layout == torch.strided else str(tensor.layout)
        )

    def whole(self) -> Tensor:
        return self._tensor


class Part(Source):
    """Some rows (dim 0) or columns (dim 1) of a tensor."""

    def __init__(self, source: Source, dim: int, begin: int, end: int) -> None:
        self._source, self._dim, self._begin, self._end = source, dim, begin, end
        self.shape = (*source.shape[:dim], end - begin, *source.shape[dim + 1 :])
        self.dtype = source.dtype

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        if dim == self._dim:
            return self._source.part(dim, self._begin + begin, self._begin + end)
        return self._source.part(dim, begin, end).narrow(self._dim, self._begin, self._end - self._begin)


class ExpertMatrix(Source):
    """Some outputs of one expert's matrix or bias, as [outputs, ...], in a tensor that holds those of all experts. transposed: the
    matrices there have a row for each input."""

    def __init__(self, source: Source, expert: int, outputs: range, *, transposed: bool = False) -> None:
        self._source, self._expert, self._transposed = source, expert, transposed
        self._outputs = slice(outputs.start, outputs.stop, outputs.step)
        self.shape = (len(outputs), *(source.shape[1:-1] if transposed else source.shape[2:]))
        self.dtype = source.dtype

    def whole(self) -> Tensor:
        matrix = self._source.part(0, self._expert, self._expert + 1)[0]
        if not self._transposed:
            return matrix[self._outputs]
        found = matrix[..., self._outputs]
        return found.t() if found.dim() == 2 else found
