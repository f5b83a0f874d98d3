"""Vectors of prompts (Pool tasks) on their way from the device to the host."""

import torch
from torch import Tensor


class PooledVectors:
    """They are there when the step has ended."""

    def __init__(self, hidden: Tensor, last_tokens: dict[int, int]) -> None:
        """hidden [t, hidden]: of the step's tokens, after the final norm. last_tokens: place in the batch -> the token in the step that
        is the last one of its prompt."""
        self._places = list(last_tokens)
        vectors = hidden[list(last_tokens.values())].float()
        self._host = vectors
        if vectors.is_cuda:
            self._host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
            self._host.copy_(vectors, non_blocking=True)

    def by_place(self) -> dict[int, bytes]:
        """float32, by place in the batch. After the step's end only."""
        return {place: vector.tobytes() for place, vector in zip(self._places, self._host.numpy(), strict=True)}
