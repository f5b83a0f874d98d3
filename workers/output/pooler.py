"""Vectors of prompts (Pool tasks): made of the hidden states of the steps that compute a prompt, and brought to the host.

Heads make of pooled states a classifier's scores, an embedding that is projected, cut and normalised, or the weight of words. BGE-M3
(Chen et al. 2024, 2.2 of the paper): a product gives each token of a prompt its weight, relu(w h + b), and another one the token's
vector for late interaction; both are in files of their own. SPLADE (Formal et al. 2021): log(1 + relu(logits)) of the masked language
model's head; `Pooler` takes the greatest over the prompt.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor

from meshlm.protocol.config import Resolved
from meshlm.protocol.edges.step import RowFailed
from meshlm.protocol.pool import Pool, PoolHead, PoolKind
from meshlm.protocol.pooling import DenseSpec, PoolingSpec
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.models.classifier import FUNCTIONS, Classifier
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.models.encoder import Encoder
from meshlm.workers.output.logprobs import on_host
from meshlm.workers.rows.device_rows import put
from meshlm.workers.rows.extras.extra import StepExtra, StepFindings
from meshlm.workers.rows.extras.prompt_results import Pooling

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


NO_VECTOR = RowFailed("the numbers of the model's vector are not finite", ErrorKind.INTERNAL)


def of_vectors(pooled: dict[int, bytes]) -> dict[int, RowFailed]:
    """By place in the batch, where a vector of float32 has a number that is infinite or none at all."""
    with np.errstate(invalid="ignore"):  # inf - inf
        sums = {place: np.frombuffer(vector, np.float32).sum(dtype=np.float64) for place, vector in pooled.items()}
    return {place: NO_VECTOR for place, found in sums.items() if not np.isfinite(found)}


Finish = Callable[[Tensor, Pool], Tensor]
"""Pooled states float32 [n, hidden] -> what the task wants of them [n, any] (output/pooler.py)."""


class Pooler:
    """Owned by the engine of a stage that has the last layer.

    A prompt begins anew at position 0, whoever had its row before; so nobody has to say when a request goes."""

    def __init__(self, finish: Finish) -> None:
        self._finish = finish
        # By row, of prompts that take several steps: float32 [hidden], a sum or a state; of ALL what is finished already.
        self._so_far: dict[int, Tensor] = {}
        self._lines: dict[int, list[Tensor]] = {}

    def for_step(self, step: list[Pooling]) -> "PooledStep | None":
        """The vectors of the rows of a step that take some of its tokens' states; None where no row does."""
        taking = [each for each in step if each.takes_states]
        return PooledStep(self, taking) if taking else None

    def pool(self, hidden: Tensor, step: list[Pooling]) -> tuple[list[int], list[Tensor]]:
        """The places of prompts that end in the step, and their vectors. hidden [t, hidden]: of the step's tokens, after the final
        norm."""
        places: list[int] = []
        vectors: list[Tensor] = []
        tasks: dict[Pool, list[Pooling]] = {}
        for each in step:
            tasks.setdefault(replace(each.task, second_from=0), []).append(each)
        for task, rows in tasks.items():
            if task.kind is PoolKind.ALL:
                self._all(hidden, task, rows, places, vectors)
            elif task.kind is PoolKind.SPLADE:
                self._greatest(hidden, task, rows, places, vectors)
            elif ends := [each for each in rows if each.is_last]:
                states = self._states(hidden, task.kind, ends)
                places += [each.place for each in ends]
                vectors += self._finish(states, task).unbind()
            for each in rows:
                if not each.is_last and task.kind not in (PoolKind.ALL, PoolKind.SPLADE):
                    self._so_far[each.row] = self._part(hidden, each)
        return places, vectors

    def _states(self, hidden: Tensor, kind: PoolKind, rows: list[Pooling]) -> Tensor:
        """float32 [rows, hidden], of prompts that end here."""
        whole = sum(each.num_prompt for each in rows if each.is_first) == len(hidden)
        if kind is PoolKind.MEAN and whole and hidden.is_cuda:  # they have the step for themselves: one kernel for all
            lens = put(np.array([each.num_prompt for each in rows], np.int64), hidden.device)
            return torch.segment_reduce(hidden.float(), "mean", lengths=lens, axis=0, unsafe=True)
        if kind is PoolKind.MEAN:
            return torch.stack([self._part(hidden, each) / each.num_prompt for each in rows])
        if kind is PoolKind.LAST or all(each.is_first for each in rows):
            taken = [each.end - 1 if kind is PoolKind.LAST else each.begin for each in rows]
            return hidden[put(np.array(taken, np.int64), hidden.device)].float()
        return torch.stack([self._part(hidden, each) for each in rows])

    def _part(self, hidden: Tensor, each: Pooling) -> Tensor:
        if each.kind is PoolKind.MEAN:
            found = hidden[each.begin : each.end].sum(dim=0, dtype=torch.float32)
            return found if each.is_first else found + self._so_far.pop(each.row)
        return hidden[each.begin].float() if each.is_first else self._so_far.pop(each.row)

    def _greatest(
        self, hidden: Tensor, task: Pool, rows: list[Pooling], places: list[int], vectors: list[Tensor]
    ) -> None:
        """The greatest weight of each token of the vocabulary, over what is computed so far."""
        for each in rows:
            found = self._finish(hidden[each.begin : each.end].float(), task).amax(dim=0)
            if not each.is_first:
                found = torch.maximum(found, self._so_far.pop(each.row))
            if each.is_last:
                places.append(each.place)
                vectors.append(found)
            else:
                self._so_far[each.row] = found

    def _all(self, hidden: Tensor, task: Pool, rows: list[Pooling], places: list[int], vectors: list[Tensor]) -> None:
        """A vector for each token, finished as they come."""
        for each in rows:
            lines = self._finish(hidden[each.begin : each.end].float(), task)
            if not (each.is_first and each.is_last):
                so_far = [] if each.is_first else self._lines.pop(each.row)
                self._lines[each.row] = [*so_far, lines]
            if each.is_last:
                places.append(each.place)
                vectors.append(torch.cat(self._lines.pop(each.row)) if not each.is_first else lines)


class PooledStep(StepExtra[Tensor]):
    """The rows of one step. Their vectors are on the host when the step has ended."""

    why_no_graph = "pooling"

    def __init__(self, pooler: Pooler, step: list[Pooling]) -> None:
        self._pooler, self._step = pooler, step
        self._places: list[int] = []

    def after_model(self, hidden: Tensor) -> None:
        self._places, vectors = self._pooler.pool(hidden, self._step)
        if vectors:
            self._ends = np.cumsum([vector.numel() for vector in vectors])
            self._host = on_host(torch.cat([vector.flatten() for vector in vectors]))

    def findings(self) -> StepFindings:
        if not self._places:
            return StepFindings()
        parts = np.split(self._host.numpy(), self._ends[:-1])
        pooled = {place: part.tobytes() for place, part in zip(self._places, parts, strict=True)}
        failed = of_vectors(pooled)
        return StepFindings({place: vector for place, vector in pooled.items() if place not in failed}, failed=failed)
