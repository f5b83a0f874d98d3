"""Vectors of prompts (Pool tasks): made of the hidden states of the steps that compute a prompt, and brought to the host."""

import numpy as np
import torch
from torch import Tensor

from meshlm.protocol.tasks import PoolKind
from meshlm.workers.output.sampler import put
from meshlm.workers.rows import Pooling


class PooledVectors:
    """They are there when the step has ended."""

    def __init__(self, places: list[int], vectors: Tensor) -> None:
        """places: in the batch. vectors [places, hidden], float32."""
        self._places = places
        self._host = vectors
        if vectors.is_cuda:
            self._host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
            self._host.copy_(vectors, non_blocking=True)

    def by_place(self) -> dict[int, bytes]:
        """float32, by place in the batch. After the step's end only."""
        return {place: vector.tobytes() for place, vector in zip(self._places, self._host.numpy(), strict=True)}


class Pooler:
    """Owned by the engine of a stage that has the last layer.

    A prompt begins anew at position 0, whoever had its row before; so nobody has to say when a request goes.
    """

    def __init__(self) -> None:
        self._so_far: dict[
            int, Tensor
        ] = {}  # by row, of prompts that take several steps: float32 [hidden], a sum or a state

    def pool(self, hidden: Tensor, step: list[Pooling]) -> PooledVectors | None:
        """hidden [t, hidden]: of the step's tokens, after the final norm. step: those of its rows that take some of them."""
        last = [each for each in step if each.kind is PoolKind.LAST]
        places = [each.place for each in last]
        ends = put(np.array([each.end - 1 for each in last], np.int64), hidden.device)
        vectors = list(hidden[ends].float())
        for each in step:
            if each.kind is PoolKind.LAST:
                continue
            found = self._mean(hidden, each) if each.kind is PoolKind.MEAN else self._first(hidden, each)
            if each.is_last:
                places.append(each.place)
                vectors.append(found)
            else:
                self._so_far[each.row] = found
        return PooledVectors(places, torch.stack(vectors)) if places else None

    def _mean(self, hidden: Tensor, each: Pooling) -> Tensor:
        """The sum so far, or the mean after the last token."""
        found = hidden[each.begin : each.end].sum(dim=0, dtype=torch.float32)
        if not each.is_first:
            found += self._so_far.pop(each.row)
        return found / each.num_prompt if each.is_last else found

    def _first(self, hidden: Tensor, each: Pooling) -> Tensor:
        return hidden[each.begin].float() if each.is_first else self._so_far.pop(each.row)
