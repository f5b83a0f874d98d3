"""Log-probabilities on their way from the device to the host, of sampled tokens and of prompts."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.protocol.edges.token import LogprobColumns
from meshlm.workers.output import logprobs


class Part(NamedTuple):
    """A request's lines of packed log-probabilities."""

    place: int  # in the batch
    begin: int
    end: int
    width: int


class Details:
    """Log-probabilities on their way to the host: they are there when the step has ended."""

    def __init__(self, packed: Tensor, parts: list[Part]) -> None:
        self._parts = parts
        self._host = packed
        if packed.is_cuda:
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)

    def columns(self) -> dict[int, LogprobColumns]:
        """The columns by place in the batch; valid after the step's end only."""
        values = self._host.numpy()
        return {part.place: logprobs.unpack(values[part.begin : part.end], part.width) for part in self._parts}


def prompt_logprobs(
    hidden: Tensor, following: Tensor, place: int, width: int, logits_of: Callable[[Tensor], Tensor]
) -> Details:
    """Gives the log-probabilities of the prompt tokens `following` [p] of the request at this place, given the hidden states [p,
    hidden] before each."""
    packed = logprobs.in_chunks(hidden, following.long(), width, logits_of)
    return Details(packed, [Part(place, 0, len(hidden), width)])
