"""Weights of a .gguf file as its bytes: they stay packed in a GPU's memory (kernels/packed_gemm), or are decoded there after loading.

Rows of one layer may be of several types.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from meshlm.kernels.packed_gemm.ggml import packed
from meshlm.kernels.packed_gemm.reference import WARM_ROWS, PackedWeight, decode
from meshlm.workers.formats.format import Encode, Fused
from meshlm.workers.formats.unquantized import Unquantized

if TYPE_CHECKING:
    from meshlm.workers.layers.linear import Linear
    from meshlm.workers.layers.ops import Ops


class Span(NamedTuple):
    """Some rows of a weight, all of one type."""

    rows: int
    ggml_type: int
    row_bytes: int


class GGUFFormat:
    """See `meshlm.workers.formats.format.WeightFormat`. Until `finish` the weight is the file's bytes, span after span."""

    encode: Encode | None = None

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self._spans = spans
        self.weights: tuple[PackedWeight, ...] = ()
        self._dtype = torch.get_default_dtype()  # the model's, while it is made

    def add_parameters(self, linear: "Linear") -> None:
        size = sum(span.rows * span.row_bytes for span in self._spans)
        linear.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)

    def finish(self, linear: "Linear", ops: "Ops") -> None:
        self.weights = tuple(ops.proven(weight, self._dtype) for weight in self._packed(linear))
        linear.weight = nn.Parameter(self.weights[0].low, requires_grad=False)

    def values(self, linear: "Linear") -> Tensor:
        return torch.cat([decode(weight, self._dtype) for weight in self._packed(linear)])

    def apply(self, linear: "Linear", x: Tensor, ops: "Ops") -> Tensor:
        if len(self.weights) == 1:
            return ops.packed_linear(x, self.weights[0], linear.bias)
        sizes = [span.rows for span in self._spans]
        biases = [None] * len(sizes) if linear.bias is None else list(linear.bias.split(sizes))
        return torch.cat(
            [ops.packed_linear(x, weight, bias) for weight, bias in zip(self.weights, biases, strict=True)], dim=1
        )

    def variant(self) -> object:
        return tuple(weight.variant for weight in self.weights)

    def warm_rows(self) -> set[int]:
        return set(WARM_ROWS)

    def fused(self, kind: Fused) -> bool:
        return False

    def _packed(self, linear: "Linear") -> tuple[PackedWeight, ...]:
        sizes = [span.rows * span.row_bytes for span in self._spans]
        return tuple(
            packed(data.view(span.rows, -1), span.ggml_type, self._dtype)
            for span, data in zip(self._spans, linear.weight.data.split(sizes), strict=True)
        )


class DecodedGGUF(Unquantized):
    """See `meshlm.workers.formats.format.WeightFormat`. The file's bytes are loaded, and become values on the device."""

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self._file = GGUFFormat(spans)

    def add_parameters(self, linear: "Linear") -> None:
        self._file.add_parameters(linear)

    def finish(self, linear: "Linear", ops: "Ops") -> None:
        """Nothing of the file's form is left."""
        linear.weight = nn.Parameter(ops.pack(self._file.values(linear)), requires_grad=False)

    def values(self, linear: "Linear") -> Tensor:
        return self._file.values(linear)
