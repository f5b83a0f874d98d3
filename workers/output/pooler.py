"""Vectors of prompts (Pool tasks): made of the hidden states of the steps that compute a prompt, and brought to the host."""

from collections.abc import Callable

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from meshlm.protocol.edges.step import RowFailed
from meshlm.protocol.pool import Pool, PoolKind
from meshlm.protocol.wire.ids import ErrorKind
from meshlm.workers.output.logprobs import on_host
from meshlm.workers.rows.device_rows import put
from meshlm.workers.rows.extras.extra import StepExtra, StepFindings
from meshlm.workers.rows.extras.prompt_results import Pooling

NO_VECTOR = RowFailed("the numbers of the model's vector are not finite", ErrorKind.INTERNAL)


def of_vectors(pooled: dict[int, bytes]) -> dict[int, RowFailed]:
    """By place in the batch, where a vector of float32 has a number that is infinite or none at all."""
    with np.errstate(invalid="ignore"):  # inf - inf
        sums = {place: np.frombuffer(vector, np.float32).sum(dtype=np.float64) for place, vector in pooled.items()}
    return {place: NO_VECTOR for place, found in sums.items() if not np.isfinite(found)}


Finish = Callable[[Tensor, Pool], Tensor]
"""Pooled states float32 [n, hidden] -> what the task wants of them [n, any] (output/pooled_heads.py)."""


class Pooler:
    """Owned by the engine of a stage that has the last layer.

    A prompt begins anew at position 0, whoever had its row before; so nobody has to say when a request goes.
    """

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
        """The sum so far, or the first token's state."""
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
