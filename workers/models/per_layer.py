"""A vector of each token for each layer (Gemma 3n, Gemma 4): of the token's number and of its embedding.

    e = (norm(E x / sqrt(hidden)) + table[id] * sqrt(own)) / sqrt(2)

With a tensor-parallel rank each has all of it.
"""

import torch
from torch import Tensor, nn

from meshlm.protocol.model import PerLayerInputSpec
from meshlm.workers.batch import StepInputs
from meshlm.workers.layers.embedding import Embedding
from meshlm.workers.layers.linear import Linear
from meshlm.workers.layers.norm import RMSNorm
from meshlm.workers.layers.ops import Ops


class PerLayerInputs(nn.Module):
    def __init__(self, sizes: PerLayerInputSpec, layers: int, hidden: int, eps: float) -> None:
        super().__init__()
        self._own, self._known = sizes.hidden_size_per_layer_input, sizes.vocab_size_per_layer_input
        self._hidden = hidden
        self._every = layers * self._own
        self.embed = Embedding(self._known, self._every, 0, self._known)
        self.project = Linear(hidden, layers * self._own, bias=False)
        self.norm = RMSNorm(self._own, eps)
        self._scale = 1.0

    def prepare(self, dtype: torch.dtype) -> None:
        """The scale of the table is rounded to the model's dtype first, as that of the embeddings."""
        self._scale = float(torch.tensor(self._own**0.5, dtype=dtype))

    def forward(self, x: Tensor, batch: StepInputs, ops: Ops) -> Tensor:
        """x [t, hidden]: the first layer's -> [t, layers, own]. Of tokens whose vectors came with a prompt, of these alone."""
        projected = self.project(x, ops) * self._hidden**-0.5
        lines = projected.view(-1, self._own)
        projected = ops.rms_norm(lines, self.norm.weight, self.norm.eps).view(len(x), -1, self._own)
        ids = batch.known_ids
        rows = ops.rows(torch.where(ids < self._known, ids, 0), self.embed.weight, self._every)
        rows = rows.view_as(projected) * self._scale
        both: Tensor = (projected + rows) * 2**-0.5
        return batch.chosen(projected, both)
