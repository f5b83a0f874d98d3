"""Weights of a .gguf file as its bytes: they stay packed in a GPU's memory (kernels/packed_gemm), or are decoded there after loading.

Rows of one layer may be of several types.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.kernels.packed_experts.layout import Format, format_of_blocks, of_blocks
from meshlm.kernels.packed_gemm.ggml import packed
from meshlm.kernels.packed_gemm.reference import WARM_ROWS, PackedWeight, decode
from meshlm.workers.formats.expert_codes import ExpertCodes
from meshlm.workers.formats.format import ProductOps, WeightedLayer
from meshlm.workers.formats.packed import packed_linear, tested


class Span(NamedTuple):
    """Some rows of a weight, all of one type."""

    rows: int
    ggml_type: int
    row_bytes: int


class DecodedGGUF(ExpertCodes):
    """Until `finish` the weight is the file's bytes, span after span; then it is their values."""

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self._spans = spans

    def add_parameters(self, layer: WeightedLayer) -> None:
        layer.add("weight", sum(span.rows * span.row_bytes for span in self._spans), dtype=torch.uint8)

    @property
    def codes_format(self) -> Format | None:
        return format_of_blocks(self._spans[0].ggml_type) if len(self._spans) == 1 else None

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        if self.keeps_codes and layer.stack:
            ((rows, ggml_type, _),) = self._spans
            self.keep_codes(
                layer, lambda own: of_blocks(own["weight"].unflatten(-1, (rows, -1)), ggml_type, layer.dtype)
            )
            return
        layer.keep("weight", self.values(layer))
        super().finish(layer, ops)

    def values(self, layer: WeightedLayer) -> Tensor:
        found = [
            torch.cat([decode(weight, layer.dtype) for weight in self._packed(matrix["weight"], layer.dtype)])
            for matrix in layer.matrices()
        ]
        return torch.stack(found) if layer.stack else found[0]

    def _packed(self, data: Tensor, dtype: torch.dtype) -> tuple[PackedWeight, ...]:
        sizes = [span.rows * span.row_bytes for span in self._spans]
        return tuple(
            packed(part.view(span.rows, -1), span.ggml_type, dtype)
            for span, part in zip(self._spans, data.split(sizes), strict=True)
        )


class GGUFFormat(DecodedGGUF):
    """The file's codes stay packed."""

    weights: tuple[PackedWeight, ...] = ()

    @property
    def is_fusible(self) -> bool:
        return False

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        if layer.stack:
            super().finish(layer, ops)
            return
        self.weights = tuple(tested(weight, layer.dtype) for weight in self._packed(layer.weight.data, layer.dtype))
        layer.keep("weight", self.weights[0].low)

    def apply(self, layer: WeightedLayer, x: Tensor, ops: ProductOps) -> Tensor:
        sizes = [span.rows for span in self._spans]
        biases = [None] * len(sizes) if layer.bias is None else list(layer.bias.split(sizes))
        products = [packed_linear(x, weight, bias) for weight, bias in zip(self.weights, biases, strict=True)]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def variant(self) -> object:
        return tuple(weight.variant for weight in self.weights)

    def warm_rows(self) -> set[int]:
        return set(WARM_ROWS)
