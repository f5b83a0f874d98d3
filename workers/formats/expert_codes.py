"""Experts whose weights stay packed on a GPU, where kernels/packed_experts decodes what it multiplies: of files with codes, or MXFP4.

The loader says before `finish` which layers keep their codes (weights/layer_formats.py). All others, and linear layers, have what
their format makes of the codes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.packed_experts import layout
from meshlm.workers.formats.format import Encode, GroupedWeight, KernelWeight, ProductOps, Unquantized, WeightedLayer

PARAMETERS = {"codes": "weight", "scales": "weight_scale", "high": "weight_high", "order": "input_order"}
"""The names that an `ExpertWeight`'s tensors have as a layer's parameters."""
CODES_AT_ONCE = 1 << 26  # that are brought into another form: some bytes each, for a while


class ExpertCodes(Unquantized):
    """A format whose experts may keep the codes of their files."""

    keeps_codes = False
    """Whether experts do; set before `finish`."""
    _kept: tuple[int, layout.Format, int] | None = None  # inputs, format and columns of the weights, once they are kept

    @property
    def codes_format(self) -> layout.Format | None:
        """How experts' codes would be kept; None: kernels do not read them."""
        return None

    def keep_codes(self, layer: WeightedLayer, pack: Callable[[dict[str, Tensor]], layout.ExpertWeight]) -> None:
        """Makes the weights of all experts the layer's parameters. pack: some experts' parameters, by name, in the form of kernels."""
        own = {name: parameter.data for name, parameter in layer.named_parameters(recurse=False) if name != "bias"}
        (experts,), each = layer.stack, max(1, CODES_AT_ONCE // (layer.outputs * layer.inputs))
        parts = (
            pack({name: tensor[begin : begin + each] for name, tensor in own.items()})
            for begin in range(0, experts, each)
        )
        weight = layout.concatenate(list(parts))
        layer.drop_others()
        for name, tensor in weight.tensors().items():
            layer.keep(PARAMETERS[name], tensor.view(torch.uint8) if name == "codes" else tensor)
        self._kept = weight.inputs, weight.format, weight.columns

    def expert_weight(self, layer: WeightedLayer) -> layout.ExpertWeight | None:
        """The weights of experts that keep their codes."""
        if self._kept is None:
            return None
        inputs, format, columns = self._kept
        held = dict(layer.named_parameters(recurse=False))
        found = {field: held[name].data for field, name in PARAMETERS.items() if name in held}
        codes, scales = found.pop("codes").view(torch.int16), found.pop("scales")
        return layout.ExpertWeight(codes, scales, inputs, format, columns=columns, **found)

    def expert_linear(self, layer: WeightedLayer, number: int, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.expert_weight(layer)
        if weight is None:
            return super().expert_linear(layer, number, x, bias)
        return F.linear(x, layout.unpack(weight.of_expert(number), x.dtype), bias)

    def expert_kernel(self, layer: WeightedLayer) -> KernelWeight:
        weight = self.expert_weight(layer)
        return super().expert_kernel(layer) if weight is None else weight


def packed_experts(weight: layout.ExpertWeight, dtype: torch.dtype) -> GroupedWeight:
    """The products of experts with these weights, of activations of this dtype."""

    def linear(number: int, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, layout.unpack(weight.of_expert(number), x.dtype), bias)

    shape = len(weight.codes), weight.outputs, weight.columns or weight.inputs
    return GroupedWeight(weight, linear, shape, dtype, weight.codes.device)


class MXFP4Format(ExpertCodes):
    """Codes and scales as kernels read them; floats become so while they are loaded."""

    encode: Encode | None = staticmethod(layout.encode_mxfp4)

    def add_parameters(self, layer: WeightedLayer) -> None:
        chunks = layout.chunks_of(layer.inputs)
        layer.add("weight", layer.outputs, chunks * 64, dtype=torch.uint8)
        layer.add("weight_scale", layer.outputs, chunks * 4, dtype=torch.uint8)
        self._kept = layer.inputs, layout.MXFP4, 0

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        """The loader has packed it."""

    def values(self, layer: WeightedLayer) -> Tensor:
        weight = self.expert_weight(layer)
        assert weight is not None
        return layout.unpack(weight, layer.dtype)
