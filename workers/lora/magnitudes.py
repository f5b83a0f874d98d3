"""DoRA (Liu et al. 2024): each row of a layer's weight with its adapter has a length of its own, W' = m / |W + BA| (W + BA).

How long the rows of W + BA are is measured from what the layer computes with, whatever its format, when an adapter is loaded and when
the base has other weights. Where tensor ranks have some of a row's numbers each, each rank measures its own; steps sum the squares.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from meshlm.workers.formats.format import Unquantized

if TYPE_CHECKING:
    from meshlm.workers.layers.elements import Linear
    from meshlm.workers.layers.ops import Ops
    from meshlm.workers.lora.weights import LinearAdapters

CHUNK = 256  # rows of a unit matrix, or of a weight, at a time


class Magnitudes(NamedTuple):
    """Of the outputs of one slice (weights.py). The last two are written in place by `measure`."""

    lengths: Tensor  # float32 [outputs]: m
    over_ranks: bool  # the tensor ranks have some of each row's numbers
    squares: Tensor  # float64 [outputs]: of the lengths of this worker's rows of W + BA
    factors: Tensor  # [outputs] of the model's dtype: m / |W + BA|, where this worker has whole rows

    @classmethod
    def of(cls, lengths: Tensor, *, over_ranks: bool, dtype: torch.dtype) -> "Magnitudes":
        squares = torch.zeros(len(lengths), dtype=torch.float64, device=lengths.device)
        return cls(lengths, over_ranks, squares, torch.ones_like(lengths, dtype=dtype))

    def factors_of(self, ops: "Ops") -> Tensor:
        """[outputs]. Where the ranks have shares of the rows, all of them call it in the same step."""
        if not self.over_ranks:
            return self.factors
        total = ops.finish_sum(ops.term(self.squares.clone(), None), self.squares.dtype)
        return _factors(self.lengths, total).to(self.factors.dtype)


def measure(layers: "LinearAdapters", ops: "Ops") -> None:
    """The lengths of the rows that adapters change, of the weights that the layers have now."""
    for layer, found in layers.items():
        marked = [one for one in found.slices if one.magnitudes is not None]
        if not marked:
            continue
        a = ops.rows(torch.arange(found.rank, device=marked[0].b.device), found.a, layer.inputs).double()
        for one in marked:
            assert one.magnitudes is not None
            places = torch.arange(one.end - one.begin, device=one.b.device)
            b = ops.rows(places, one.b, one.rank).double()
            squares = _squares(layer, (one.begin, one.end), b, a[one.first : one.first + one.rank], ops)
            one.magnitudes.squares.copy_(squares)
            one.magnitudes.factors.copy_(_factors(one.magnitudes.lengths, squares))


def _factors(lengths: Tensor, squares: Tensor) -> Tensor:
    """A row of zeros has no direction, and stays one."""
    return lengths / squares.sqrt().clamp(min=torch.finfo(torch.float32).tiny)


def _squares(layer: "Linear", rows: tuple[int, int], b: Tensor, a: Tensor, ops: "Ops") -> Tensor:
    """float64 [outputs]: of the rows of W + BA, of which this worker's numbers."""
    begin, end = rows
    total = torch.zeros(end - begin, dtype=torch.float64, device=b.device)
    if isinstance(layer.format, Unquantized):
        for first in range(begin, end, CHUNK):
            own = slice(first - begin, min(first + CHUNK, end) - begin)
            weight = ops.rows(torch.arange(first, begin + own.stop, device=b.device), layer.weight, layer.inputs)
            total[own] = (weight.double() + b[own] @ a).square().sum(1)
        return total
    for columns, products in _columns(layer, ops):
        total += (products[:, begin:end].double().T + b @ a[:, columns]).square().sum(1)
    return total


def _columns(layer: "Linear", ops: "Ops") -> Iterator[tuple[slice, Tensor]]:
    """The columns of a weight that is stored in whichever way: its products with unit vectors, [columns, outputs]."""
    device = layer.weight.device
    for first in range(0, layer.inputs, CHUNK):
        columns = slice(first, min(first + CHUNK, layer.inputs))
        units = torch.zeros(columns.stop - first, layer.inputs, dtype=layer.dtype, device=device)
        units[:, columns].fill_diagonal_(1.0)
        products = layer.format.apply(layer, units, ops)
        yield columns, products if layer.bias is None else products - layer.bias
