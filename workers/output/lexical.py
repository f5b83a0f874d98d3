"""The weight of words: what encoders for lexical search make of their tokens' states, in the place of a vector or beside it.

BGE-M3 (Chen et al. 2024, 2.2 of the paper): a product gives each token of a prompt its weight, relu(w h + b), and another one the
token's vector for late interaction; both are in files of their own. SPLADE (Formal et al. 2021): log(1 + relu(logits)) of the masked
language model's head; `Pooler` takes the greatest over the prompt.
"""

from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.protocol.config import Resolved
from meshlm.protocol.pool import Pool, PoolHead, PoolKind
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.models.encoder import Encoder

SPARSE, COLBERT = "sparse_linear.pt", "colbert_linear.pt"


class LexicalHead(Protocol):
    """What a family makes of states."""

    def __call__(self, states: Tensor, task: Pool) -> Tensor | None:
        """float32 [n, hidden] -> float32 [n, any]; None where the task is none of its own."""
        ...


class BgeM3:
    """The products of BGE-M3, in float32: weight [any, hidden] and bias [any] each."""

    def __init__(self, sparse: tuple[Tensor, Tensor], colbert: tuple[Tensor, Tensor]) -> None:
        self._sparse, self._colbert = sparse, colbert

    def __call__(self, states: Tensor, task: Pool) -> Tensor | None:
        if task.head is PoolHead.CLASSIFY:
            weights = F.linear(states, *self._sparse)
            return weights.relu() if task.activation else weights
        return F.linear(states, *self._colbert) if task.kind is PoolKind.ALL else None


class Splade:
    """The masked language model's head of `model`."""

    def __init__(self, model: Encoder) -> None:
        self._model = model

    def __call__(self, states: Tensor, task: Pool) -> Tensor | None:
        return self._model.masked_logits(states).float().relu_().log1p_() if task.kind is PoolKind.SPLADE else None


def lexical_head(model: Decoder, resolved: Resolved, device: torch.device) -> LexicalHead | None:
    """That of the model; None where it has none. ProcessFatal."""
    if resolved.spec.lexical == "splade":
        assert isinstance(model, Encoder)
        return Splade(model)
    if resolved.spec.lexical == "bge-m3":
        hidden = resolved.spec.hidden_size
        return BgeM3(_product(resolved, SPARSE, 1, hidden, device), _product(resolved, COLBERT, 0, hidden, device))
    return None


def _product(resolved: Resolved, name: str, outputs: int, inputs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Weight and bias. outputs: 0: any number."""
    if resolved.load_format == "dummy":
        return torch.full((outputs or inputs, inputs), 0.02, device=device), torch.zeros(
            outputs or inputs, device=device
        )
    path = Path(resolved.model_path) / name
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
        weight, bias = tensors["weight"].float(), tensors["bias"].float()
    except Exception as error:  # torch and pickle raise anything for a file that is broken
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ProcessFatal(f"{path}: BgeM3EmbeddingModel needs this file, which cannot be read ({what})") from None
    right = weight.dim() == 2 and weight.shape[1] == inputs and bias.shape == weight.shape[:1]
    if not right or (outputs and len(weight) != outputs) or set(tensors) != {"weight", "bias"}:
        raise ProcessFatal(f"{path}: its tensors are not those of a product of {inputs} by {outputs or 'any number'}")
    return weight.to(device), bias.to(device)
