"""DoRA: the lengths of a weight's rows with its adapter, whichever way the weight is stored, and after it has changed."""

import pytest
import torch
from torch import Tensor, nn

from meshlm.workers.formats.format import KernelWeight, ProductOps, Unquantized, WeightedLayer, WeightFormat
from meshlm.workers.layers.elements import Linear
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.lora.magnitudes import CHUNK, Magnitudes, measure
from meshlm.workers.lora.step_adapters import StepAdapters, TokensOfAdapter
from meshlm.workers.lora.weights import LinearAdapter, OutputSlice

INPUTS, OUTPUTS, RANK = CHUNK + 9, 6, 3


class Coded(WeightFormat):
    """Nothing but its products says what the weight is: twice what the layer's parameter holds."""

    def add_parameters(self, layer: WeightedLayer) -> None:
        layer.add("weight", layer.outputs, layer.inputs)

    def finish(self, layer: WeightedLayer, ops: ProductOps) -> None:
        raise AssertionError

    def values(self, layer: WeightedLayer) -> Tensor:
        raise AssertionError

    def apply(self, layer: WeightedLayer, x: Tensor, ops: ProductOps) -> Tensor:
        return ops.linear(x, 2 * layer.weight, layer.bias, layer.outputs)

    def expert_linear(self, layer: WeightedLayer, number: int, x: Tensor, bias: Tensor | None) -> Tensor:
        raise AssertionError

    def expert_kernel(self, layer: WeightedLayer) -> KernelWeight:
        raise AssertionError


@pytest.mark.parametrize(("format", "times"), [(Unquantized(), 1), (Coded(), 2)])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_have_the_lengths_that_they_are_to_have(format: WeightFormat, times: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer, ops = Linear(INPUTS, OUTPUTS, bias=bias), TorchOps()
    layer.use(format)
    shift = torch.randn(OUTPUTS) if bias else torch.zeros(OUTPUTS)
    if bias:
        layer.keep("bias", shift)
    a, b, lengths = torch.randn(RANK, INPUTS), torch.randn(4, RANK), torch.rand(4) + 1
    marks = Magnitudes.of(lengths, over_ranks=False, dtype=torch.float32)
    layers = {layer: LinearAdapter(a, RANK, (OutputSlice(1, 5, 0, RANK, b, marks),))}
    x = torch.randn(7, INPUTS)
    for _ in range(2):
        layer.weight = nn.Parameter(torch.randn(OUTPUTS, INPUTS), requires_grad=False)
        measure(layers, ops)
        rows = times * layer.weight[1:5] + b @ a
        expected = layer.format.apply(layer, x, ops)
        changed = expected.clone()
        changed[:, 1:5] = x @ (lengths[:, None] * rows / rows.norm(dim=1, keepdim=True)).T + shift[1:5]
        step = StepAdapters([TokensOfAdapter(torch.tensor([0, 3, 6]), layers)])
        found = step.add(layer, x, expected.clone(), ops)
        torch.testing.assert_close(found[[0, 3, 6]], changed[[0, 3, 6]], atol=1e-4, rtol=1e-4)
        assert torch.equal(found[[1, 2, 4, 5]], expected[[1, 2, 4, 5]])
