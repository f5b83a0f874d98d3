"""What becomes of pooled states: a classifier's scores, an embedding that is projected, cut and normalised, or the weight of words.

BGE-M3 (Chen et al. 2024, 2.2 of the paper): a product gives each token of a prompt its weight, relu(w h + b), and another one the
token's vector for late interaction; both are in files of their own. SPLADE (Formal et al. 2021): log(1 + relu(logits)) of the masked
language model's head; `Pooler` takes the greatest over the prompt.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.protocol.config import Resolved
from meshlm.protocol.pool import Pool, PoolHead, PoolKind
from meshlm.protocol.pooling import DenseSpec, PoolingSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.models.classifier import FUNCTIONS, Classifier
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.models.encoder import Encoder

SPARSE, COLBERT = "sparse_linear.pt", "colbert_linear.pt"


LexicalHead = Callable[[Tensor, Pool], Tensor | None]
"""What a family makes of states float32 [n, hidden]: float32 [n, any]; None where the task is none of its own."""


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


class Dense:
    """One Dense module of sentence-transformers, in float32."""

    def __init__(self, spec: DenseSpec, weight: Tensor, bias: Tensor | None) -> None:
        self._act, self._weight, self._bias = FUNCTIONS[spec.act.lower()], weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._act(F.linear(x, self._weight, self._bias))


class PooledHeads:
    """The heads of one model, for `Pooler`."""

    def __init__(
        self,
        classifier: Classifier | None,
        dense: list[Dense],
        projection: Tensor | None = None,
        pooling: PoolingSpec | None = None,
        lexical: LexicalHead | None = None,
    ) -> None:
        """projection [any, hidden]: a model's own, before the Dense modules. pooling: it knows how logits are calibrated.
        lexical: what it knows of the weight of words."""
        self._lexical = lexical
        self._calibration = (0.0, 1.0) if pooling is None else (pooling.logit_mean, pooling.logit_sigma)
        self._classifier, self._dense = classifier, dense
        self._projection = None if projection is None else projection.float()

    def __call__(self, states: Tensor, task: Pool) -> Tensor:
        """float32 [n, hidden] -> float32 [n, any]."""
        if self._lexical is not None and (found := self._lexical(states, task)) is not None:
            if task.head is PoolHead.CLASSIFY or task.kind is PoolKind.SPLADE:
                return found
            states = found
        if task.head is PoolHead.CLASSIFY:
            assert self._classifier is not None, "the supervisor lets nobody ask for a classifier that is not there"
            scores: Tensor = self._classifier(states, activation=task.activation, calibration=self._calibration)
            return scores
        if self._projection is not None and task.head is PoolHead.EMBED:
            states = F.linear(states, self._projection)
        for dense in self._dense if task.head is PoolHead.EMBED else ():
            states = dense(states)
        if task.dimensions:
            states = states[:, : task.dimensions]
        return F.normalize(states, dim=-1) if task.head is PoolHead.EMBED and task.activation else states


def load_dense(resolved: Resolved, device: torch.device) -> list[Dense]:
    """The Dense modules of the model's folder. ProcessFatal."""
    found = []
    for spec in resolved.pooling.dense if resolved.pooling is not None else ():
        folder = Path(resolved.model_path) / spec.folder
        tensors = {} if resolved.load_format == "dummy" else _read(folder)
        weight = tensors.get("linear.weight", torch.full((spec.outputs, spec.inputs), 0.02))
        bias = tensors.get("linear.bias", torch.zeros(spec.outputs)) if spec.bias else None
        wrong = weight.shape != (spec.outputs, spec.inputs) or (bias is not None and bias.shape != (spec.outputs,))
        if wrong or (tensors and len(tensors) != 1 + spec.bias):
            raise ProcessFatal(f"{folder}: its tensors are not those of a product of {spec.inputs} by {spec.outputs}")
        found.append(Dense(spec, weight.float().to(device), None if bias is None else bias.float().to(device)))
    return found


def _read(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        if (folder / "model.safetensors").is_file():
            tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
            return tensors
        tensors = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    except Exception as error:  # torch and pickle raise anything for a file that is broken
        raise ProcessFatal(f"{folder}: its weights cannot be read ({str(error).splitlines()[0]})") from None
    return tensors
