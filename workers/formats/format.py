"""WeightFormat: how the weight of a linear layer is stored, and how the layer computes with it.

A `WeightFormat` belongs to one layer. Loading asks it for parameters, then to `finish`; a model asks which fused kernels may take the
weight by themselves, once, when it is prepared. So nothing is decided in a step.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from meshlm.workers.layers.linear import Linear
    from meshlm.workers.layers.ops import Ops


class Fused(Enum):
    """A kernel of `Ops` that computes more than the product, from `Linear.weight` in the form that the ops want."""

    NORM = auto()  # norm_linear
    ROW_PARALLEL = auto()  # row_parallel_linear


Encode = Callable[[Tensor], dict[str, Tensor]]
"""Floats [rows, inputs] -> rows of the parameters that a layer keeps, by their names."""


class WeightFormat(Protocol):
    """The method of one linear layer."""

    encode: Encode | None
    """What quantises a layer's weight while it is loaded; None: files hold its parameters."""

    def add_parameters(self, linear: "Linear") -> None:
        """Give the layer the parameters that files fill, on the meta device; `weight` is one of them."""
        ...

    def finish(self, linear: "Linear", ops: "Ops") -> None:
        """Brings the parameters, after loading, into the form that `apply` wants."""
        ...

    def values(self, linear: "Linear") -> Tensor:
        """The weight [outputs, inputs] in the dtype of the model; called after loading, in the place of `finish`."""
        ...

    def apply(self, linear: "Linear", x: Tensor, ops: "Ops") -> Tensor:
        """[m, inputs] -> [m, outputs], with the bias."""
        ...

    def variant(self) -> object:
        """Asked after `finish`: layers of equal sizes whose variants are equal run the same kernels."""
        ...

    def warm_rows(self) -> set[int]:
        """So many rows meet every kernel of this method that steps may run."""
        ...

    def fused(self, kind: Fused) -> bool:
        """Whether that kernel may take the weight. Asked once, after `finish`."""
        ...
