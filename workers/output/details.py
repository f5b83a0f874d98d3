"""Log-probabilities on their way from the device to the host, of sampled tokens and of prompts."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from meshlm.protocol.edges.token import LogprobColumns
from meshlm.workers.output import logprobs
from meshlm.workers.rows.extras.extra import StepExtra, StepFindings
from meshlm.workers.rows.extras.prompt_logprobs import PromptSpan


def on_host(values: Tensor) -> Tensor:
    """A copy on its way to the host, which does not wait for it: it is there when the step has ended."""
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


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
        self._host = on_host(packed)

    def columns(self) -> dict[int, LogprobColumns]:
        """The columns by place in the batch; valid after the step's end only."""
        values = self._host.numpy()
        return {part.place: logprobs.unpack(values[part.begin : part.end], part.width) for part in self._parts}


def columns_by_place(details: list[Details]) -> dict[int, LogprobColumns]:
    """All of a step, by place in the batch; after its end only."""
    return {place: columns for one in details for place, columns in one.columns().items()}


class PromptLogprobsStep(StepExtra[Tensor]):
    """The log-probabilities of the prompt tokens that follow those of one step."""

    why_no_graph = "prompt_logprobs"

    def __init__(self, spans: list[PromptSpan], tokens: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
        """tokens int32 [rows, length]: all, by row."""
        self._spans, self._tokens, self._logits_of = spans, tokens, logits_of
        self._found: list[Details] = []

    def after_model(self, hidden: Tensor) -> None:
        for place, row, begin, position, count, width in self._spans:
            following = self._tokens[row, position : position + count]
            self._found.append(prompt_logprobs(hidden[begin : begin + count], following, place, width, self._logits_of))

    def findings(self) -> StepFindings:
        return StepFindings(prompt_logprobs=columns_by_place(self._found))


def prompt_logprobs(
    hidden: Tensor, following: Tensor, place: int, width: int, logits_of: Callable[[Tensor], Tensor]
) -> Details:
    """Gives the log-probabilities of the prompt tokens `following` [p] of the request at this place, given the hidden states [p,
    hidden] before each."""
    packed = logprobs.in_chunks(hidden, following.long(), width, logits_of)
    return Details(packed, [Part(place, 0, len(hidden), width)])
