"""FP8 weights (e4m3), and activations that are rounded to FP8 or stay as they are (eight_bits.py).

    x_q = fp8(x / s_x)        s_x: of the file, or max |x| / 448 of a token, or of a token's group of inputs
    w_q, s_w                  s_w: of a row of the weight, or of a row's group of inputs

A scale of a whole tensor or of a block is a scale of each of its rows: then any rows make a layer. Dynamic scales are always a token's
own, also where a file asks for one of all tokens: else a text would depend on its neighbours.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.fp8_gemm.reference import Fp8Weight, quantised_rows
from meshlm.protocol.model import QuantizationScheme
from meshlm.workers.formats.eight_bits import EightBits, InputScale
from meshlm.workers.formats.format import Encode, KernelWeight, Norm, ProductOps, WeightedLayer, has_kernels
from meshlm.workers.partial_sum import Kind, PartialSum

FP8 = torch.float8_e4m3fn
MAX = torch.finfo(FP8).max
LEAST_SCALE = 1e-12  # of a token of zeros


class Fp8Format(EightBits[Fp8Weight]):
    code_type = FP8

    def __init__(self, scheme: QuantizationScheme) -> None:
        super().__init__(scheme)
        self.encode: Encode | None = encoder(scheme) if scheme.online else None

    def num_groups(self, inputs: int) -> int:
        return groups(self.scheme, inputs)

    def decoded(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return decoded(codes, scales, self.scheme, dtype)

    def rounded(self, x: Tensor, given: InputScale) -> Tensor:
        return rounded(x, self.scheme, given.scale)

    def native_weight(self, matrix: dict[str, Tensor], given: InputScale, dtype: torch.dtype) -> Fp8Weight | None:
        if not has_kernels(matrix["weight"].device, dtype) or not has_same_groups(self.scheme):
            return None
        from meshlm.workers.formats import triton_products

        return triton_products.tested_fp8(self._weight(matrix, given), dtype)

    def _weight(self, matrix: dict[str, Tensor], given: InputScale) -> Fp8Weight:
        scheme = self.scheme
        return Fp8Weight(
            matrix["weight"][given.rows],
            matrix["weight_scale"][given.rows].contiguous(),
            scheme.block[1] if scheme.weight == "block" else 0,
            None if scheme.activation == "none" else scheme.group,
            given.scale,
        )

    def native_product(self, x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        from meshlm.workers.formats import triton_products

        return triton_products.fp8_linear(x, weight, bias)

    def after_norm(
        self, layer: WeightedLayer, x: PartialSum, norm: Norm, ops: ProductOps, gate: str
    ) -> tuple[Tensor, Tensor]:
        """One row's norm, product and gate are one kernel."""
        native = self._native[0] if len(self._native) == 1 and not (gate and layer.bias is not None) else None
        if native is not None and native.one_row and x.kind is Kind.WHOLE and x.value.shape[0] == 1:
            from meshlm.workers.formats import triton_products

            return triton_products.norm_fp8_row(x, native, layer.bias, norm, gate)
        return super().after_norm(layer, x, norm, ops, gate)

    def expert_kernel(self, layer: WeightedLayer) -> KernelWeight:
        """Where files have scales of inputs, all experts of a product take the largest: rows are rounded before they are sorted."""
        matrix = {name: parameter.data for name, parameter in layer.named_parameters()}
        return self._weight(matrix, InputScale(0, layer.stack[0], self._largest, None))


def has_same_groups(scheme: QuantizationScheme) -> bool:
    """Whether weights and inputs have scales for the same groups."""
    group = scheme.block[1] if scheme.weight == "block" else 0
    return (scheme.activation != "group" or scheme.group == group) and not (group and scheme.activation == "static")


def encoder(scheme: QuantizationScheme) -> Encode:
    """Rounds floats to codes whose scales are of rows, or of a row's groups of inputs."""

    def encode(values: Tensor) -> dict[str, Tensor]:
        inputs, count = values.shape[1], groups(scheme, values.shape[1])
        size = scheme.block[1] if count > 1 else inputs
        parted = F.pad(values, (0, count * size - inputs)).unflatten(1, (count, size)).flatten(0, 1)
        codes, scales = quantised_rows(parted)
        return {"weight": codes.view(len(values), -1)[:, :inputs], "weight_scale": scales.view(len(values), count)}

    return encode


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
