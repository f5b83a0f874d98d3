"""FP8 weights (e4m3) and activations that are rounded to FP8. Correct on every device.

    x_q = fp8(x / s_x)                        s_x: of the file, or max |x| / 448 of a token, or of a token's group of inputs
    y = (x_q * s_x) (w_q * s_w)^T + bias      s_w: of a row of the weight, or of a row's group of inputs

A scale of a whole tensor or of a block is a scale of each of its rows: then any rows make a layer. A GPU that knows 8-bit floats
multiplies them as they are (kernels/fp8_gemm). On others weights stay FP8 in memory and one layer's values exist while it computes; a
CPU, which would take longer to decode than to multiply, decodes once, after loading.
Dynamic scales are always a token's own, also where a file asks for one of all tokens: else a text would depend on its neighbours.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.kernels.fp8_gemm.reference import WARM_ROWS as FP8_WARM_ROWS
from meshlm.kernels.fp8_gemm.reference import Fp8Weight, quantised_rows
from meshlm.protocol.model import QuantizationScheme
from meshlm.workers.formats.format import Encode, Fused

if TYPE_CHECKING:
    from meshlm.workers.layers.linear import Linear
    from meshlm.workers.layers.ops import Ops

FP8 = torch.float8_e4m3fn
MAX = torch.finfo(FP8).max
LEAST_SCALE = 1e-12  # of a token of zeros


class _Rows(NamedTuple):
    """Rows of a weight whose input has one scale; the whole weight, unless files bring several for what is one layer here."""

    begin: int
    end: int
    input_scale: Tensor | None
    weight: Tensor | None  # its values, packed; None: they are decoded for each product
    native: Fp8Weight | None = None  # they are multiplied as they are


class Fp8Format:
    """See `meshlm.workers.formats.format.WeightFormat`."""

    def __init__(self, scheme: QuantizationScheme) -> None:
        self.scheme = scheme
        self.encode: Encode | None = encoder(scheme) if scheme.online else None
        self._scales = torch.empty(0)
        self._rows: tuple[_Rows, ...] = ()
        self._dtype = torch.get_default_dtype()  # the model's, while it is made

    def add_parameters(self, linear: "Linear") -> None:
        """Beside the weight float32 scales: of its rows [outputs, groups of inputs] and, where files have them, of inputs [outputs]."""

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)

        linear.weight = empty(linear.outputs, linear.inputs, dtype=FP8)
        linear.weight_scale = empty(linear.outputs, groups(self.scheme, linear.inputs))
        if self.scheme.activation == "static":
            linear.input_scale = empty(linear.outputs)

    def finish(self, linear: "Linear", ops: "Ops") -> None:
        """Each projection of a layer (query, key, value; gate, up) may have brought an input scale of its own."""
        counts, scales = [linear.outputs], None
        if self.scheme.activation == "static":
            scales, each = torch.unique_consecutive(linear.input_scale, return_counts=True)
            counts = each.tolist()
        assert isinstance(linear.weight_scale, Tensor)
        self._scales = linear.weight_scale
        found, begin = [], 0
        for nth, count in enumerate(counts):
            rows = _Rows(begin, begin + count, None if scales is None else scales[nth], None)
            if linear.weight.device.type == "cpu":
                rows = rows._replace(weight=ops.pack(self._values(linear, rows, self._dtype)))
            elif self._alike():
                rows = rows._replace(native=ops.proven_fp8(self._as_they_are(linear, rows), self._dtype))
            found.append(rows)
            begin += count
        self._rows = tuple(found)
        linear.eight_bits = found[0].native if len(found) == 1 else None
        if linear.weight.device.type == "cpu":
            linear.weight = nn.Parameter(linear.weight[:0].clone(), requires_grad=False)

    def values(self, linear: "Linear") -> Tensor:
        assert isinstance(linear.weight_scale, Tensor)
        self._scales = linear.weight_scale
        return self._values(linear, _Rows(0, linear.outputs, None, None), self._dtype)

    def apply(self, linear: "Linear", x: Tensor, ops: "Ops") -> Tensor:
        products = [self._product(linear, x, rows, ops) for rows in self._rows]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def variant(self) -> object:
        return self.scheme

    def warm_rows(self) -> set[int]:
        return set(FP8_WARM_ROWS) if any(rows.native is not None for rows in self._rows) else set()

    def fused(self, kind: Fused) -> bool:
        """No kernel here rounds activations or scales weights."""
        return False

    def _alike(self) -> bool:
        """Whether weights and inputs have scales for the same groups."""
        scheme = self.scheme
        group = scheme.block[1] if scheme.weight == "block" else 0
        return (scheme.activation != "group" or scheme.group == group) and not (group and scheme.activation == "static")

    def _as_they_are(self, linear: "Linear", rows: _Rows) -> Fp8Weight:
        part, scheme = slice(rows.begin, rows.end), self.scheme
        return Fp8Weight(
            linear.weight.data[part],
            self._scales[part].contiguous(),
            scheme.block[1] if scheme.weight == "block" else 0,
            None if scheme.activation == "none" else scheme.group,
            rows.input_scale,
        )

    def _product(self, linear: "Linear", x: Tensor, rows: _Rows, ops: "Ops") -> Tensor:
        if rows.native is not None:
            bias = None if linear.bias is None else linear.bias[rows.begin : rows.end]
            return ops.fp8_linear(x, rows.native, bias)
        weight = self._values(linear, rows, x.dtype) if rows.weight is None else rows.weight
        bias = None if linear.bias is None else linear.bias[rows.begin : rows.end]
        return ops.linear(rounded(x, self.scheme, rows.input_scale), weight, bias, rows.end - rows.begin)

    def _values(self, linear: "Linear", rows: _Rows, dtype: torch.dtype) -> Tensor:
        """The values of these rows of the weight."""
        codes, scale = linear.weight[rows.begin : rows.end], self._scales[rows.begin : rows.end]
        return decoded(codes, scale, self.scheme, dtype)


def encoder(scheme: QuantizationScheme) -> Encode:
    """Rounds floats to codes whose scales are of rows, or of a row's groups of inputs."""

    def encode(values: Tensor) -> dict[str, Tensor]:
        inputs, count = values.shape[1], groups(scheme, values.shape[1])
        size = scheme.block[1] if count > 1 else inputs
        parted = F.pad(values, (0, count * size - inputs)).unflatten(1, (count, size)).flatten(0, 1)
        codes, scales = quantised_rows(parted)
        return {"weight": codes.view(len(values), -1)[:, :inputs], "weight_scale": scales.view(len(values), count)}

    return encode


class ExpertScales(NamedTuple):
    """The scales of a layer's experts whose weights are codes: float32 [experts, outputs, groups of inputs]."""

    gate_up: Tensor
    down: Tensor
    scheme: QuantizationScheme
    dtype: torch.dtype  # that they compute in


def decoded(codes: Tensor, scale: Tensor, scheme: QuantizationScheme, dtype: torch.dtype) -> Tensor:
    """The values of weights [..., outputs, inputs] with scales [..., outputs, groups]."""
    if scale.shape[-1] > 1:
        scale = scale.repeat_interleave(scheme.block[1], dim=-1)[..., : codes.shape[-1]]
    return (codes.to(torch.float32) * scale).to(dtype)


def groups(scheme: QuantizationScheme, inputs: int) -> int:
    """The number of scales that a row of the weight has."""
    return -(-inputs // scheme.block[1]) if scheme.weight == "block" else 1


def rounded(x: Tensor, scheme: QuantizationScheme, input_scale: Tensor | None) -> Tensor:
    """x [m, inputs] with the values that FP8 leaves of it."""
    if scheme.activation == "none":
        return x
    values = x.to(torch.float32)
    if scheme.activation == "group":
        tail = -values.shape[1] % scheme.group  # the last group may be smaller
        values = (F.pad(values, (0, tail)) if tail else values).view(values.shape[0], -1, scheme.group)
    scale = (
        (values.abs().amax(dim=-1, keepdim=True) / MAX).clamp(min=LEAST_SCALE) if input_scale is None else input_scale
    )
    values = (values / scale).clamp(-MAX, MAX).to(FP8).to(torch.float32) * scale
    return values.flatten(1)[:, : x.shape[1]].to(x.dtype)
