"""Weights of 8 bits and activations that are rounded to 8 bits: what FP8 and INT8 have in common. Correct on every device.

    y = (x_q s_x) (w_q s_w)^T + bias

A layer's rows may have several scales of their inputs, since files bring several projections for what is one product here. A GPU that
has kernels multiplies codes as they are. Elsewhere the weight stays in 8 bits and one layer's values exist while it computes; a CPU,
which would take longer to decode than to multiply, decodes once, after loading.
"""

from abc import abstractmethod
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.fp8_gemm.reference import WARM_ROWS, Fp8Weight
from meshlm.kernels.quantise_int8.reference import Int8Weight
from meshlm.protocol.model import QuantizationScheme
from meshlm.workers.formats.format import ProductOps, WeightedLayer, WeightFormat

Native = TypeVar("Native", Fp8Weight, Int8Weight)


class InputScale(NamedTuple):
    """Rows begin to end of a weight, whose input has one scale."""

    begin: int
    end: int
    scale: Tensor | None  # of the file; None: each token finds its own
    zero: Tensor | None

    @property
    def rows(self) -> slice:
        return slice(self.begin, self.end)


class EightBits(WeightFormat, Generic[Native]):
    """Beside the weight a layer has float32 scales of its rows and, where files have them, scales and zero points of inputs."""

    code_type: ClassVar[torch.dtype]

    def __init__(self, scheme: QuantizationScheme) -> None:
        self.scheme = scheme
        self._inputs: list[list[InputScale]] = []  # of each matrix
        self._values: list[Tensor] = []  # of a CPU's linear layer: those of each span of rows, packed
        self._native: list[Native] = []  # of a GPU's, where it has the kernels
        self._largest: Tensor | None = None  # input scale of experts, where files have them

    @abstractmethod
    def num_groups(self, inputs: int) -> int:
        """The number of scales that a row of the weight has."""

    @abstractmethod
    def decoded(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of weights [..., outputs, inputs] with scales [..., outputs, groups]."""

    @abstractmethod
    def rounded(self, x: Tensor, given: InputScale) -> Tensor:
        """x [m, inputs] with the values that 8 bits leave of it."""

    @abstractmethod
    def native_weight(self, matrix: dict[str, Tensor], given: InputScale, dtype: torch.dtype) -> Native | None:
        """These rows of a weight as kernels take them; None: no kernel does here."""

    @abstractmethod
    def native_product(self, x: Tensor, weight: Native, bias: Tensor | None) -> Tensor:
        """The product by kernels."""

    def add_parameters(self, layer: WeightedLayer) -> None:
        layer.add("weight", layer.outputs, layer.inputs, dtype=self.code_type)
        layer.add("weight_scale", layer.outputs, self.num_groups(layer.inputs), dtype=torch.float32)
        if self.scheme.activation == "static":
            layer.add("input_scale", layer.outputs, dtype=torch.float32)
            if self.scheme.zeros:
                layer.add("input_zero_point", layer.outputs, dtype=torch.float32)

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        matrices = layer.matrices()
        self._inputs = [input_scales(matrix, layer.outputs) for matrix in matrices]
        on_cpu = layer.weight.device.type == "cpu"
        if layer.stack:
            if on_cpu:
                layer.keep("weight", self.values(layer))
            elif self.scheme.activation == "static":
                self._largest = layer.get_parameter("input_scale").amax()
            return
        native = [self.native_weight(matrices[0], given, layer.dtype) for given in self._inputs[0]]
        self._native = [one for one in native if one is not None]
        if on_cpu and not self._native:
            scales = matrices[0]["weight_scale"]
            self._values = [
                ops.pack(self.decoded(layer.weight[given.rows], scales[given.rows], layer.dtype))
                for given in self._inputs[0]
            ]
            layer.keep("weight", layer.weight[:0].clone())

    def values(self, layer: WeightedLayer) -> Tensor:
        found = [self.decoded(matrix["weight"], matrix["weight_scale"], layer.dtype) for matrix in layer.matrices()]
        return torch.stack(found) if layer.stack else found[0]

    def apply(self, layer: WeightedLayer, x: Tensor, ops: ProductOps) -> Tensor:
        products = [self._product(layer, x, nth, ops) for nth in range(len(self._inputs[0]))]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def _product(self, layer: WeightedLayer, x: Tensor, nth: int, ops: ProductOps) -> Tensor:
        given = self._inputs[0][nth]
        bias = None if layer.bias is None else layer.bias[given.rows]
        if self._native:
            return self.native_product(x, self._native[nth], bias)
        if self._values:
            weight = self._values[nth]
        else:
            (matrix,) = layer.matrices()
            weight = self.decoded(matrix["weight"][given.rows], matrix["weight_scale"][given.rows], x.dtype)
        return ops.linear(self.rounded(x, given), weight, bias, given.end - given.begin)

    def expert_linear(self, layer: WeightedLayer, number: int, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = layer.weight[number]
        if weight.dtype == self.code_type:
            weight = self.decoded(weight, layer.matrices()[number]["weight_scale"], x.dtype)
        products = [F.linear(self.rounded(x, given), weight[given.rows]) for given in self._inputs[number]]
        out = products[0] if len(products) == 1 else torch.cat(products, dim=1)
        return out if bias is None else out + bias

    def variant(self) -> object:
        return self.scheme

    def warm_rows(self) -> set[int]:
        return set(WARM_ROWS) if self._native else set()


def input_scales(matrix: dict[str, Tensor], outputs: int) -> list[InputScale]:
    """The scales and zero points of a weight's inputs, and the rows that each is for."""
    scales, zeros = matrix.get("input_scale"), matrix.get("input_zero_point")
    if scales is None:
        return [InputScale(0, outputs, None, None)]
    pairs, counts = torch.unique_consecutive(
        torch.stack((scales, torch.zeros_like(scales) if zeros is None else zeros), dim=1), dim=0, return_counts=True
    )
    found, begin = [], 0
    for (scale, zero), count in zip(pairs.unbind(), counts.tolist(), strict=True):
        found.append(InputScale(begin, begin + count, scale.clone(), None if zeros is None else zero.clone()))
        begin += count
    return found
