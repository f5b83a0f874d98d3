"""What a row-parallel product (o, down) and the embedding hand to the norm that follows: a sum that may not be finished yet.

Whoever makes one says what is left to do, so that the norm, or the product behind it, can do that on its way. Nobody guesses it from a
shape or from which tensor it is.
"""

from enum import Enum, auto
from typing import NamedTuple

from torch import Tensor


class Kind(Enum):
    """The step that is left before `PartialSum.value` is the sum."""

    WHOLE = auto()
    """Nothing."""
    RANK = auto()
    """It is this tensor-parallel rank's term; the sum is over the ranks."""
    SPLIT_K = auto()
    """It is [s, m, n] float32, terms of parts of the product's inner dimension; the sum is over the first dimension."""
    IN_FLIGHT = auto()
    """This rank's term was sent to all ranks. The value has the sum's shape and no content."""


class PartialSum(NamedTuple):
    """A sum [m, n] and the residual [m, n] that it is to be added to; None: the sum is the residual.

    own_norm: weight and eps of a norm of the sum alone, to be taken before it is added. Only `Ops.own_norm` makes a sum that has one.
    """

    value: Tensor
    kind: Kind = Kind.WHOLE
    residual: Tensor | None = None
    own_norm: tuple[Tensor, float] | None = None
