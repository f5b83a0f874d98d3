"""Weights and activations of 8-bit integers (compressed-tensors' int-quantized), multiplied as they are on a GPU.

A scale of a whole tensor is a scale of each of its rows. Elsewhere weights become their values, and activations what rounding leaves.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from meshlm.kernels.fp8_gemm.reference import WARM_ROWS
from meshlm.kernels.quantise_int8.reference import Int8Weight, quantise
from meshlm.protocol.model import QuantizationScheme
from meshlm.workers.formats.format import Encode, Fused

if TYPE_CHECKING:
    from meshlm.workers.layers.linear import Linear
    from meshlm.workers.layers.ops import Ops


class _Rows(NamedTuple):
    """Rows whose input has one scale: files bring several for what is one layer here."""

    begin: int
    end: int
    weight: Int8Weight
    values: Tensor | None  # packed, where integers are not multiplied


class Int8Format:
    """See `meshlm.workers.formats.format.WeightFormat`."""

    def __init__(self, scheme: QuantizationScheme) -> None:
        self.scheme = scheme
        self.encode: Encode | None = encode if scheme.online else None
        self._rows: tuple[_Rows, ...] = ()
        self._dtype = torch.get_default_dtype()  # the model's, while it is made

    def add_parameters(self, linear: "Linear") -> None:
        """Beside the weight float32 scales of its rows and, where files have them, scales and zero points of inputs [outputs]."""

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)

        linear.weight = empty(linear.outputs, linear.inputs, dtype=torch.int8)
        linear.weight_scale = empty(linear.outputs, 1)
        if self.scheme.activation == "static":
            linear.input_scale = empty(linear.outputs)
            if self.scheme.zeros:
                linear.input_zero_point = empty(linear.outputs)

    def finish(self, linear: "Linear", ops: "Ops") -> None:
        codes, scales = linear.weight.data, linear.weight_scale
        assert isinstance(scales, Tensor)
        found, begin, native = [], 0, False
        for given, count in self._inputs(linear):
            part = slice(begin, begin + count)
            input_scale, input_zero = given
            sums = codes[part].sum(dim=1, dtype=torch.int32).float()
            weight = Int8Weight(
                codes[part], scales[part].contiguous(), sums, not self.scheme.zeros, input_scale, input_zero
            )
            native = ops.takes_int8(weight, self._dtype)
            values = None if native else ops.pack((codes[part].float() * scales[part]).to(self._dtype))
            found.append(_Rows(begin, begin + count, weight if native else weight._replace(codes=codes[:0]), values))
            begin += count
        self._rows = tuple(found)
        if not native:
            linear.weight = nn.Parameter(codes[:0].clone(), requires_grad=False)

    def _inputs(self, linear: "Linear") -> list[tuple[tuple[Tensor | None, Tensor | None], int]]:
        """Scales and zero points of inputs, and how many rows each has."""
        if self.scheme.activation != "static":
            return [((None, None), linear.outputs)]
        assert isinstance(linear.input_scale, Tensor)
        zeros = linear.input_zero_point if self.scheme.zeros else torch.zeros_like(linear.input_scale)
        assert isinstance(zeros, Tensor)
        both, counts = torch.unique_consecutive(
            torch.stack((linear.input_scale, zeros), dim=1), dim=0, return_counts=True
        )
        pairs = [(pair[0].contiguous(), pair[1].contiguous() if self.scheme.zeros else None) for pair in both]
        return list(zip(pairs, counts.tolist(), strict=True))

    def values(self, linear: "Linear") -> Tensor:
        assert isinstance(linear.weight_scale, Tensor)
        return (linear.weight.float() * linear.weight_scale).to(self._dtype)

    def apply(self, linear: "Linear", x: Tensor, ops: "Ops") -> Tensor:
        products = [self._product(linear, x, rows, ops) for rows in self._rows]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def _product(self, linear: "Linear", x: Tensor, rows: _Rows, ops: "Ops") -> Tensor:
        bias = None if linear.bias is None else linear.bias[rows.begin : rows.end]
        if rows.values is None:
            return ops.int8_linear(x, rows.weight, bias)
        weight = rows.weight
        codes, scales, zeros = quantise(x, weight.symmetric, weight.input_scale, weight.input_zero)
        rounded = ((codes.float() - zeros) * scales).to(x.dtype)
        return ops.linear(rounded, rows.values, bias, rows.end - rows.begin)

    def variant(self) -> object:
        return self.scheme

    def warm_rows(self) -> set[int]:
        return set(WARM_ROWS)

    def fused(self, kind: Fused) -> bool:
        """No kernel here rounds activations or scales weights."""
        return False


def encode(values: Tensor) -> dict[str, Tensor]:
    """Each row to the nearest of 255 integers."""
    codes, scales, _ = quantise(values, True)
    return {"weight": codes, "weight_scale": scales}
