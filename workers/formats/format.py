"""WeightFormat: how the weight of a linear layer, or the weights of a layer's experts, are stored, and how products are computed.

A `WeightFormat` belongs to one layer. The loader asks it for parameters and calls `finish` once files have filled them. Kernels are
chosen there, so nothing is decided in a step. A `WeightedLayer` has one matrix, or one for each expert of a rank; so each format serves
linear layers and experts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshlm.kernels.fp8_gemm.reference import Fp8Weight
from meshlm.kernels.packed_experts.layout import ExpertWeight
from meshlm.kernels.quantise_int8.reference import Int8Weight
from meshlm.workers.partial_sum import PartialSum

Encode = Callable[[Tensor], dict[str, Tensor]]
"""Floats [rows, inputs] -> rows of the parameters that a layer keeps, by their names."""
Norm = tuple[Tensor, float]
"""The weight and the eps of a norm."""


class ProductOps(Protocol):
    """The operations of `Ops` that formats build on."""

    def pack(self, weight: Tensor) -> Tensor: ...

    def linear(self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int) -> Tensor: ...

    def act_mul(self, gate_up: Tensor, act: str) -> Tensor: ...

    def norm(self, x: PartialSum, norm: Norm) -> tuple[Tensor, Tensor]: ...

    def term(self, x: Tensor, residual: Tensor | None) -> PartialSum: ...

    def norm_linear(
        self, x: PartialSum, norm: Norm, packed: Tensor, bias: Tensor | None, outputs: int, *, gate: str = ""
    ) -> tuple[Tensor, Tensor]: ...

    def row_parallel_linear(
        self, x: Tensor, packed: Tensor, bias: Tensor | None, outputs: int, residual: Tensor | None
    ) -> PartialSum: ...


@cache
def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels compute with activations of this dtype on this device."""
    return device.type == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability(device) >= (8, 0)


KernelWeight = Tensor | Fp8Weight | Int8Weight | ExpertWeight
"""What kernels of experts take. The first dimension of each tensor is the expert's."""


class GroupedWeight(NamedTuple):
    """The same product of each expert of a rank, as the classes that compute experts take it (workers/moe/experts)."""

    kernel: KernelWeight
    linear: Callable[[int, Tensor, Tensor | None], Tensor]  # one expert's product, in plain torch: number, x, bias
    shape: tuple[int, int, int]  # experts, outputs, inputs
    dtype: torch.dtype  # of activations and results
    device: torch.device


Product = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]
"""`ProductOps.linear`: x, packed, bias, outputs."""


class WeightedLayer(nn.Module):
    """A linear layer, or the linear layers of all experts of a rank. Files fill its parameters, and its format changes them then."""

    weight: nn.Parameter
    product: "Product | None" = None
    """What multiplies by one of several matrices that `ProductOps.pack` has packed."""

    def __init__(
        self, inputs: int, outputs: int, format: "WeightFormat", *, bias: bool, stack: tuple[int, ...] = ()
    ) -> None:
        """stack: () for a linear layer, (experts,) for experts; the first dimension of all parameters."""
        super().__init__()
        self.inputs, self.outputs, self.stack = inputs, outputs, stack
        self.dtype = torch.get_default_dtype()  # the model's, while it is made
        self.use(format)
        self.bias = nn.Parameter(torch.zeros(*stack, outputs), requires_grad=False) if bias else None

    def use(self, format: "WeightFormat") -> None:
        """Gives the layer this format and its parameters; called before loading."""
        self.format = format
        format.add_parameters(self)

    def prepare(self, ops: ProductOps) -> None:
        """After loading: the weight gets the form that its format computes with."""
        self.format.finish(self, ops)

    def add(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> None:
        """Adds a parameter of this shape for each matrix."""
        self.keep(name, torch.empty(*self.stack, *shape, dtype=dtype))

    def keep(self, name: str, tensor: Tensor) -> None:
        setattr(self, name, nn.Parameter(tensor, requires_grad=False))

    def drop_others(self) -> None:
        """Removes all parameters but the weight and the bias."""
        for name in self._parameters.keys() - {"weight", "bias"}:
            self._parameters.pop(name)

    def grouped(self) -> GroupedWeight:
        """The products of experts, after `WeightFormat.finish`."""
        (experts,) = self.stack
        shape = (experts, self.outputs, self.inputs)
        kernel = self.format.expert_kernel(self)
        return GroupedWeight(kernel, partial(self.format.expert_linear, self), shape, self.dtype, self.weight.device)

    def matrices(self) -> list[dict[str, Tensor]]:
        own = {name: parameter.data for name, parameter in self.named_parameters(recurse=False)}
        if not self.stack:
            return [own]
        return [{name: tensor[number] for name, tensor in own.items()} for number in range(self.stack[0])]

    def num_weights(self) -> int:
        """The numbers in all matrices, however they are stored."""
        return self.inputs * self.outputs * (self.stack[0] if self.stack else 1)


class WeightFormat(ABC):
    encode: Encode | None = None
    """What quantises a layer's weight while it is loaded; None: files hold its parameters."""

    @abstractmethod
    def add_parameters(self, layer: WeightedLayer) -> None:
        """Gives the layer the parameters that files fill, on the meta device; `weight` is one of them."""

    @abstractmethod
    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        """Brings the parameters, after loading, into the form that products want."""

    @abstractmethod
    def values(self, layer: WeightedLayer) -> Tensor:
        """The weight [outputs, inputs] of each matrix in the dtype of the model; called after loading, instead of `finish`."""

    @abstractmethod
    def apply(self, layer: WeightedLayer, x: Tensor, ops: ProductOps) -> Tensor:
        """[m, inputs] -> [m, outputs] of a linear layer, with the bias."""

    @abstractmethod
    def expert_linear(self, layer: WeightedLayer, number: int, x: Tensor, bias: Tensor | None) -> Tensor:
        """The same for one expert, in plain torch: the reference of kernels, and what a CPU computes."""

    @abstractmethod
    def expert_kernel(self, layer: WeightedLayer) -> KernelWeight:
        """The weights of all experts in the form that kernels take, after `finish`."""

    @property
    def is_fusible(self) -> bool:
        """Whether kernels of `Ops` that compute more than the product take the layer's weight. Known after `finish`."""
        return False

    def after_norm(
        self, layer: WeightedLayer, x: PartialSum, norm: Norm, ops: ProductOps, gate: str
    ) -> tuple[Tensor, Tensor]:
        """The product with the norm of x, and the new residual; see `Ops.norm_linear`."""
        if self.is_fusible:
            return ops.norm_linear(x, norm, layer.weight, layer.bias, layer.outputs, gate=gate)
        normed, residual = ops.norm(x, norm)
        out = self.apply(layer, normed, ops)
        return (ops.act_mul(out, gate) if gate else out), residual

    def row_parallel(self, layer: WeightedLayer, x: Tensor, residual: Tensor | None, ops: ProductOps) -> PartialSum:
        if self.is_fusible:
            return ops.row_parallel_linear(x, layer.weight, layer.bias, layer.outputs, residual)
        return ops.term(self.apply(layer, x, ops), residual)

    def variant(self) -> object:
        """Asked after `finish`: layers of equal sizes whose variants are equal run the same kernels."""
        return None

    def warm_rows(self) -> set[int]:
        """So many rows meet every kernel of this format that steps may run."""
        return set()


def grouped_weight(
    format: WeightFormat, shape: tuple[int, int, int], dtype: torch.dtype, **parameters: Tensor
) -> GroupedWeight:
    """The products of experts [experts, outputs, inputs] whose parameters are these, as they are after `WeightFormat.finish`."""
    experts, outputs, inputs = shape
    with torch.device("meta"):
        layer = WeightedLayer(inputs, outputs, format, bias=False, stack=(experts,))
    layer.dtype = dtype
    for name, tensor in parameters.items():
        layer.keep(name, tensor)
    return layer.grouped()


class Unquantized(WeightFormat):
    @property
    def is_fusible(self) -> bool:
        return True

    def add_parameters(self, layer: WeightedLayer) -> None:
        layer.add("weight", layer.outputs, layer.inputs)

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        layer.keep("weight", ops.pack(layer.weight))
        if layer.stack and layer.weight.dtype == torch.uint8:
            layer.product = ops.linear

    def values(self, layer: WeightedLayer) -> Tensor:
        return layer.weight.data

    def apply(self, layer: WeightedLayer, x: Tensor, ops: ProductOps) -> Tensor:
        return ops.linear(x, layer.weight, layer.bias, layer.outputs)

    def expert_linear(self, layer: WeightedLayer, number: int, x: Tensor, bias: Tensor | None) -> Tensor:
        if layer.product is not None:
            return layer.product(x, layer.weight[number], bias, layer.outputs)
        return F.linear(x, layer.weight[number], bias)

    def expert_kernel(self, layer: WeightedLayer) -> KernelWeight:
        return layer.weight


class PackedGGUF(Unquantized):
    """The weight is uint8 of this size: panels of the file's codes and scales, which the CPU's kernels read as they are."""

    def __init__(self, size: int) -> None:
        self._size = size

    def add_parameters(self, layer: WeightedLayer) -> None:
        layer.add("weight", self._size, dtype=torch.uint8)

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        """The loader has packed it."""
        layer.product = ops.linear


UNQUANTIZED = Unquantized()


def plain_experts(weight: Tensor) -> GroupedWeight:
    """The products of experts with these weights [experts, outputs, inputs]."""
    experts, outputs, inputs = weight.shape
    return grouped_weight(UNQUANTIZED, (experts, outputs, inputs), weight.dtype, weight=weight)
