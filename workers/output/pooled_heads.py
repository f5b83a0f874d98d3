"""What becomes of pooled states: a classifier's scores, or an embedding that is projected, cut and normalised."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.protocol.config import Resolved
from meshlm.protocol.pool import Pool, PoolHead, PoolKind
from meshlm.protocol.pooling import DenseSpec, PoolingSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.models.classifier import FUNCTIONS, Classifier
from meshlm.workers.output.lexical import LexicalHead


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
