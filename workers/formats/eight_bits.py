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

from meshlm.kernels.fp8_gemm.reference import WARM_ROWS, Fp8Weight, quantised_rows
from meshlm.kernels.quantise_int8.reference import Int8Weight, quantise
from meshlm.protocol.model import QuantizationScheme
from meshlm.workers.formats import format as formats
from meshlm.workers.partial_sum import Kind, PartialSum

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


class EightBits(formats.WeightFormat, Generic[Native]):
    """Beside the weight a layer has float32 scales of its rows and, where files have them, scales and zero points of inputs."""

    code_type: ClassVar[torch.dtype]

    def __init__(self, scheme: QuantizationScheme) -> None:
        self.scheme = scheme
        self.encode: formats.Encode | None = self.encoded if scheme.online else None
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
    def encoded(self, values: Tensor) -> dict[str, Tensor]:
        """Rounds floats [rows, inputs] to codes and scales of rows, or of a row's groups of inputs."""

    @abstractmethod
    def rounded(self, x: Tensor, given: InputScale) -> Tensor:
        """x [m, inputs] with the values that 8 bits leave of it."""

    @abstractmethod
    def native_weight(self, matrix: dict[str, Tensor], given: InputScale, dtype: torch.dtype) -> Native | None:
        """These rows of a weight as kernels take them; None: no kernel does here."""

    @abstractmethod
    def native_product(self, x: Tensor, weight: Native, bias: Tensor | None) -> Tensor:
        """The product by kernels."""

    def add_parameters(self, layer: formats.WeightedLayer) -> None:
        layer.add("weight", layer.outputs, layer.inputs, dtype=self.code_type)
        layer.add("weight_scale", layer.outputs, self.num_groups(layer.inputs), dtype=torch.float32)
        if self.scheme.activation == "static":
            layer.add("input_scale", layer.outputs, dtype=torch.float32)
            if self.scheme.zeros:
                layer.add("input_zero_point", layer.outputs, dtype=torch.float32)

    def finish(self, layer: formats.WeightedLayer, ops: formats.ProductOps) -> None:
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

    def values(self, layer: formats.WeightedLayer) -> Tensor:
        found = [self.decoded(matrix["weight"], matrix["weight_scale"], layer.dtype) for matrix in layer.matrices()]
        return torch.stack(found) if layer.stack else found[0]

    def apply(self, layer: formats.WeightedLayer, x: Tensor, ops: formats.ProductOps) -> Tensor:
        products = [self._product(layer, x, nth, ops) for nth in range(len(self._inputs[0]))]
        return products[0] if len(products) == 1 else torch.cat(products, dim=1)

    def _product(self, layer: formats.WeightedLayer, x: Tensor, nth: int, ops: formats.ProductOps) -> Tensor:
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

    def expert_linear(self, layer: formats.WeightedLayer, number: int, x: Tensor, bias: Tensor | None) -> Tensor:
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


FP8 = torch.float8_e4m3fn
MAX = torch.finfo(FP8).max
LEAST_SCALE = 1e-12  # of a token of zeros


class Fp8Format(EightBits[Fp8Weight]):
    code_type = FP8

    def num_groups(self, inputs: int) -> int:
        return -(-inputs // self.scheme.block[1]) if self.scheme.weight == "block" else 1

    def decoded(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        if scales.shape[-1] > 1:
            scales = scales.repeat_interleave(self.scheme.block[1], dim=-1)[..., : codes.shape[-1]]
        return (codes.to(torch.float32) * scales).to(dtype)

    def encoded(self, values: Tensor) -> dict[str, Tensor]:
        inputs, count = values.shape[1], self.num_groups(values.shape[1])
        size = self.scheme.block[1] if count > 1 else inputs
        parted = F.pad(values, (0, count * size - inputs)).unflatten(1, (count, size)).flatten(0, 1)
        codes, scales = quantised_rows(parted)
        return {"weight": codes.view(len(values), -1)[:, :inputs], "weight_scale": scales.view(len(values), count)}

    def rounded(self, x: Tensor, given: InputScale) -> Tensor:
        scheme, scale = self.scheme, given.scale
        if scheme.activation == "none":
            return x
        values = x.to(torch.float32)
        if scheme.activation == "group":
            tail = -values.shape[1] % scheme.group  # the last group may be smaller
            values = (F.pad(values, (0, tail)) if tail else values).view(values.shape[0], -1, scheme.group)
        if scale is None:
            scale = (values.abs().amax(dim=-1, keepdim=True) / MAX).clamp(min=LEAST_SCALE)
        values = (values / scale).clamp(-MAX, MAX).to(FP8).to(torch.float32) * scale
        return values.flatten(1)[:, : x.shape[1]].to(x.dtype)

    @property
    def _group(self) -> int:
        """Inputs of a weight's row that share a scale; 0: all."""
        return self.scheme.block[1] if self.scheme.weight == "block" else 0

    def native_weight(self, matrix: dict[str, Tensor], given: InputScale, dtype: torch.dtype) -> Fp8Weight | None:
        kind, group = self.scheme.activation, self._group
        has_same_groups = (kind != "group" or self.scheme.group == group) and not (group and kind == "static")
        if not formats.has_kernels(matrix["weight"].device, dtype) or not has_same_groups:
            return None
        from meshlm.workers.formats import triton_products

        return triton_products.tested_fp8(self._weight(matrix, given), dtype)

    def _weight(self, matrix: dict[str, Tensor], given: InputScale) -> Fp8Weight:
        codes, scales = matrix["weight"][given.rows], matrix["weight_scale"][given.rows].contiguous()
        rounded = None if self.scheme.activation == "none" else self.scheme.group
        return Fp8Weight(codes, scales, self._group, rounded, given.scale)

    def native_product(self, x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        from meshlm.workers.formats import triton_products

        return triton_products.fp8_linear(x, weight, bias)

    def after_norm(
        self, layer: formats.WeightedLayer, x: PartialSum, norm: formats.Norm, ops: formats.ProductOps, gate: str
    ) -> tuple[Tensor, Tensor]:
        """One row's norm, product and gate are one kernel."""
        native = self._native[0] if len(self._native) == 1 and not (gate and layer.bias is not None) else None
        if native is not None and native.one_row and x.kind is Kind.WHOLE and x.value.shape[0] == 1:
            from meshlm.workers.formats import triton_products

            return triton_products.norm_fp8_row(x, native, layer.bias, norm, gate)
        return super().after_norm(layer, x, norm, ops, gate)

    def expert_kernel(self, layer: formats.WeightedLayer) -> formats.KernelWeight:
        """Where files have scales of inputs, all experts of a product take the largest: rows are rounded before they are sorted."""
        matrix = {name: parameter.data for name, parameter in layer.named_parameters()}
        return self._weight(matrix, InputScale(0, layer.stack[0], self._largest, None))


class Int8Format(EightBits[Int8Weight]):
    code_type = torch.int8

    def num_groups(self, inputs: int) -> int:
        return 1

    def encoded(self, values: Tensor) -> dict[str, Tensor]:
        """Each row to the nearest of 255 integers."""
        codes, scales, _ = quantise(values, True)
        return {"weight": codes, "weight_scale": scales}

    def decoded(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return (codes.float() * scales).to(dtype)

    def rounded(self, x: Tensor, given: InputScale) -> Tensor:
        codes, scales, zeros = quantise(x, not self.scheme.zeros, given.scale, given.zero)
        return ((codes.float() - zeros) * scales).to(x.dtype)

    def native_weight(self, matrix: dict[str, Tensor], given: InputScale, dtype: torch.dtype) -> Int8Weight | None:
        if not formats.has_kernels(matrix["weight"].device, dtype):
            return None
        from meshlm.workers.formats import self_test

        weight = self._weight(matrix, given)
        return weight if self_test.is_int8_right(weight, dtype) else None

    def _weight(self, matrix: dict[str, Tensor], given: InputScale) -> Int8Weight:
        codes = matrix["weight"][given.rows]
        sums = codes.sum(dim=-1, dtype=torch.int32).float()
        scales = matrix["weight_scale"][given.rows].contiguous()
        return Int8Weight(codes, scales, sums, not self.scheme.zeros, given.scale, given.zero)

    def native_product(self, x: Tensor, weight: Int8Weight, bias: Tensor | None) -> Tensor:
        from meshlm.workers.formats import triton_products

        return triton_products.int8_linear(x, weight, bias)

    def expert_kernel(self, layer: formats.WeightedLayer) -> formats.KernelWeight:
        """As `Fp8Format.expert_kernel`. Activations have no zero points, so the sums of codes are not needed."""
        scales = layer.get_parameter("weight_scale").data
        return Int8Weight(layer.weight.data, scales, scales[:0], True, self._largest)
