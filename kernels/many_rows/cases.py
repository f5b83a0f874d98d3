"""What tune.py times: a model's products of many rows and what follows each, unfused and fused, with the candidates for a tile.

The candidates are those that Triton 3.6 compiles for compute capability 9.0 without spilling registers.
"""

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from meshlm.kernels.many_rows.kernel import Key, Shape, gated
from meshlm.kernels.product.kernel import product
from meshlm.kernels.product.tune import shapes, weights_of
from meshlm.kernels.silu_mul.kernel import silu_mul

# rows, columns, inputs of a tile, warps, stages, flat, programs on a multiprocessor
GATED = [
    *(Shape(128, 128, 64, 8, stages, flat) for stages in (3, 4) for flat in (False, True)),
    *(Shape(128, 128, 128, 8, 2, flat) for flat in (False, True)),
    *(Shape(256, 64, 64, 8, 4, flat) for flat in (False, True)),
    *(Shape(128, 64, 64, 8, 3, flat, 2) for flat in (False, True)),
    Shape(128, 64, 64, 4, 3, True, 2),
    Shape(64, 128, 64, 4, 2, True, 2),
]


class Case(ABC):
    """One product, of bfloat16, on the current GPU."""

    def __init__(self, outputs: int, inputs: int, use: str) -> None:
        self.key: Key = (outputs, inputs, use)
        self.inputs = inputs
        self.weights: list[Tensor] = []

    def make(self, most_rows: int) -> None:
        """The tensors for up to so many rows."""
        self.weights = weights_of(self.key[:2])

    def free(self) -> None:
        self.weights = []

    @abstractmethod
    def candidates(self) -> list[Shape]: ...

    @abstractmethod
    def usual(self, x: Tensor, w: Tensor) -> Tensor:
        """Unfused."""

    @abstractmethod
    def fused(self, x: Tensor, w: Tensor, shape: Shape) -> Tensor: ...


class Gated(Case):
    """Gate and up projection, and silu_mul."""

    def candidates(self) -> list[Shape]:
        return GATED

    def usual(self, x: Tensor, w: Tensor) -> Tensor:
        return silu_mul(product(x, w))

    def fused(self, x: Tensor, w: Tensor, shape: Shape) -> Tensor:
        return gated(x, w, shape)


def cases(config: dict[str, Any], ranks: int) -> list[Case]:
    """Of a checkpoint's config.json, on each of so many tensor-parallel ranks."""
    _, _, gate_up, _ = shapes(config, ranks)
    return [Gated(*gate_up, "gated")]
