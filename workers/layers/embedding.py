"""A decoder's table of token embeddings, or the rows of it that a rank has."""

import torch
from torch import Tensor, nn

from meshlm.workers.layers.ops import NormWeight, Ops
from meshlm.workers.partial_sum import PartialSum


class Embedding(nn.Module):
    """Rows begin to end of a table; the other ranks have the rest. `rows` counts padding too.

    Not nn.Embedding: its initialisation imports torch's compiler, two seconds of every start.
    """

    def __init__(self, rows: int, size: int, begin: int, end: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size), requires_grad=False)
        self.begin, self.end = begin, end
        self.several = False  # ranks; they have met

    def prepare(self, ops: Ops) -> None:
        """It is the head's weight too: packed once, for both."""
        self.weight = nn.Parameter(ops.pack(self.weight), requires_grad=False)

    def forward(self, ids: Tensor, norm: NormWeight, following: Tensor, ops: Ops) -> tuple[PartialSum, Tensor | None]:
        """The residual, and its norm where that comes for free. norm, following: of the first layer, as `Ops.embed` has them."""
        if self.several:
            return ops.embed_part(ids, self.weight, (self.begin, self.end), norm)
        return ops.embed(ids, self.weight, norm, following)
