"""Experts whose weights stay packed on a GPU, where kernels/packed_experts decodes what it multiplies; of files that hold codes.

The loader says before `finish` which layers keep their codes (weights/packed_experts.py). All others, and linear layers, have what
their format makes of the codes.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.packed_experts.layout import ExpertWeight, Format, stack, unpack
from meshlm.workers.formats.format import GroupedWeight, KernelWeight, WeightedLayer
from meshlm.workers.formats.unquantized import Unquantized

PARAMETERS = {"codes": "weight", "scales": "weight_scale", "high": "weight_high", "order": "input_order"}
"""The names that an `ExpertWeight`'s tensors have as a layer's parameters."""


class ExpertCodes(Unquantized):
    """A format whose experts may keep the codes of their files."""

    keeps_codes = False
    """Whether experts do; set before `finish`."""
    _kept: tuple[int, Format, int] | None = None  # inputs, format and columns of the weights, once they are kept

    @property
    def codes_format(self) -> Format | None:
        """How experts' codes would be kept; None: kernels do not read them."""
        return None

    def keep_codes(self, layer: WeightedLayer, weights: Iterable[ExpertWeight]) -> None:
        """Makes the weights of all experts the layer's parameters."""
        weight = stack(list(weights))
        layer.drop_others()
        for name, tensor in weight.tensors().items():
            layer.keep(PARAMETERS[name], tensor.view(torch.uint8) if name == "codes" else tensor)
        self._kept = weight.inputs, weight.format, weight.columns

    def expert_weight(self, layer: WeightedLayer) -> ExpertWeight | None:
        """The weights of experts that keep their codes."""
        if self._kept is None:
            return None
        inputs, format, columns = self._kept
        held = dict(layer.named_parameters(recurse=False))
        found = {field: held[name].data for field, name in PARAMETERS.items() if name in held}
        codes, scales = found.pop("codes").view(torch.int16), found.pop("scales")
        return ExpertWeight(codes, scales, inputs, format, columns=columns, **found)

    def expert_linear(self, layer: WeightedLayer, number: int, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.expert_weight(layer)
        if weight is None:
            return super().expert_linear(layer, number, x, bias)
        return F.linear(x, unpack(weight.of_expert(number), x.dtype), bias)

    def expert_kernel(self, layer: WeightedLayer) -> KernelWeight:
        weight = self.expert_weight(layer)
        return super().expert_kernel(layer) if weight is None else weight


def packed_experts(weight: ExpertWeight, dtype: torch.dtype) -> GroupedWeight:
    """The products of experts with these weights, of activations of this dtype."""

    def linear(number: int, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, unpack(weight.of_expert(number), x.dtype), bias)

    shape = len(weight.codes), weight.outputs, weight.columns or weight.inputs
    return GroupedWeight(weight, linear, shape, dtype, weight.codes.device)
