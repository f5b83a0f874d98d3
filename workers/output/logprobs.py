"""Log-probabilities of sampled and prompt tokens: of the model's raw logits, before any sampling parameter (vLLM's default), or
as --logprobs-mode says.

Computed in chunks of LINES: a chunk's float32 temporaries are about 11 bytes for each of its logits, and a prompt may have thousands.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from meshlm.protocol.edges.token import LogprobColumns
from meshlm.workers.output import logprobs
from meshlm.workers.rows.extras.extra import StepExtra, StepFindings
from meshlm.workers.rows.extras.prompt_results import PromptSpan

LINES = 64
LEAST = -9999.0  # stands for minus infinity, which JSON does not have, as in vLLM


def packed(
    logits: Tensor, token_ids: Tensor, width: int, chosen: Tensor | None = None, *, normal: bool = True
) -> Tensor:
    """For logits [p, vocab] and the tokens int64 [p] that came: logprob, rank, and the `width` likeliest (ids, then logprobs), or
    instead of these the tokens `chosen`, int64 [p, width].

    int32 [p, 2 + 2 width] on their device, float32 by its bits: one copy brings all to the host. normal: else the logits themselves."""
    logprobs = (logits.float().log_softmax(dim=-1) if normal else logits.float()).clamp(min=LEAST)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > own).sum(dim=-1, keepdim=True) + 1
    parts = [own.view(torch.int32), ranks.int()]
    if chosen is not None:
        parts += [chosen.int(), logprobs.gather(1, chosen).view(torch.int32)]
    elif width:
        top = logprobs.topk(width, dim=-1)
        parts += [top.indices.int(), top.values.view(torch.int32)]
    return torch.cat(parts, dim=1)


def in_chunks(
    hidden: Tensor,
    token_ids: Tensor,
    width: int,
    logits_of: Callable[[Tensor], Tensor],
    chosen: Tensor | None = None,
    *,
    alone: Sequence[int] = (),
    normal: bool = True,
) -> Tensor:
    """`packed` of the logits of hidden states [p, hidden], with those of LINES positions in memory at a time.

    alone: the width of each line, up to `width`: it is packed as if it were the only one (a sum of torch's follows the number of lines
    and where they lie, and the order of equals how many are asked for)."""
    parts = []
    for begin in range(0, len(token_ids), LINES):
        some = slice(begin, begin + LINES)
        logits, ids, asked = logits_of(hidden[some]), token_ids[some], None if chosen is None else chosen[some]
        if not alone:
            parts.append(packed(logits, ids, width, asked, normal=normal))
        for nth, own in enumerate(alone[some]):
            one = slice(nth, nth + 1)
            line = packed(logits[one], ids[one], own, None if asked is None else asked[one, :own], normal=normal)
            parts.append(_widened(line, own, width))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _widened(line: Tensor, own: int, width: int) -> Tensor:
    """A packed line of its own width, as one of `width`."""
    top_ids, top = line[:, 2 : 2 + own], line[:, 2 + own :]
    return torch.cat((line[:, :2], F.pad(top_ids, (0, width - own)), F.pad(top, (0, width - own))), dim=1)


def unpack(values: NDArray[np.int32], width: int) -> LogprobColumns:
    """The columns of lines that were packed with this width or a larger one."""
    widest = (values.shape[1] - 2) // 2

    def column(begin: int, count: int) -> bytes:
        return np.ascontiguousarray(values[:, begin : begin + count]).tobytes()

    return LogprobColumns(
        width=width,
        logprobs=column(0, 1),
        ranks=column(1, 1),
        top_ids=column(2, width),
        top_logprobs=column(2 + widest, width),
    )


def first(columns: LogprobColumns, count: int) -> LogprobColumns:
    """Those of the first `count` positions."""
    width = columns.width
    return LogprobColumns(
        width=width,
        logprobs=columns.logprobs[: 4 * count],
        ranks=columns.ranks[: 4 * count],
        top_ids=columns.top_ids[: 4 * width * count],
        top_logprobs=columns.top_logprobs[: 4 * width * count],
    )


def columns(logits: Tensor, token_ids: Tensor, width: int) -> LogprobColumns:
    """The same at once, on the host."""
    return unpack(packed(logits, token_ids, width).cpu().numpy(), width)


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


LogitsOf = Callable[[int, int], Callable[[Tensor], Tensor]]
"""The first and last token of a step, and what gives the logits of their hidden states."""


class PromptLogprobsStep(StepExtra[Tensor]):
    """The log-probabilities of the prompt tokens that follow those of one step."""

    why_no_graph = "prompt_logprobs"

    def __init__(self, spans: list[PromptSpan], tokens: Tensor, logits_of: LogitsOf, *, alone: bool = False) -> None:
        """tokens int32 [rows, length]: all, by row. alone: line by line, see `in_chunks`."""
        self._spans, self._tokens, self._logits_of, self._alone = spans, tokens, logits_of, alone
        self._found: list[Details] = []

    def after_model(self, hidden: Tensor) -> None:
        for place, row, begin, position, count, width in self._spans:
            following, parts = self._tokens[row, position : position + count].long(), []
            for first in range(0, count, LINES):
                some = slice(first, min(first + LINES, count))
                states = hidden[begin : begin + count][some]
                logits_of = self._logits_of(begin + some.start, begin + some.stop)
                each = [width] * len(states) if self._alone else []
                parts.append(logprobs.in_chunks(states, following[some], width, logits_of, alone=each))
            self._found.append(Details(torch.cat(parts), [Part(place, 0, count, width)]))

    def findings(self) -> StepFindings:
        return StepFindings(prompt_logprobs=columns_by_place(self._found))
