"""Log-probabilities of sampled and prompt tokens: of the model's raw logits, before any sampling parameter (vLLM's default).

Computed in chunks of LINES: a chunk's float32 temporaries are about 11 bytes for each of its logits, and a prompt may have thousands.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.protocol.edges.token import LogprobColumns

LINES = 64


def packed(logits: Tensor, token_ids: Tensor, width: int, chosen: Tensor | None = None) -> Tensor:
    """For logits [p, vocab] and the tokens int64 [p] that came: logprob, rank, and the `width` likeliest (ids, then logprobs), or
    instead of these the tokens `chosen`, int64 [p, width].

    int32 [p, 2 + 2 width] on their device, float32 by its bits: one copy brings all to the host.
    """
    logprobs = logits.float().log_softmax(dim=-1)
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
    hidden: Tensor, token_ids: Tensor, width: int, logits_of: Callable[[Tensor], Tensor], chosen: Tensor | None = None
) -> Tensor:
    """`packed` of the logits of hidden states [p, hidden], with those of LINES positions in memory at a time."""
    parts = []
    for begin in range(0, len(token_ids), LINES):
        some = slice(begin, begin + LINES)
        parts.append(packed(logits_of(hidden[some]), token_ids[some], width, None if chosen is None else chosen[some]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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


def columns(logits: Tensor, token_ids: Tensor, width: int) -> LogprobColumns:
    """The same at once, on the host."""
    return unpack(packed(logits, token_ids, width).cpu().numpy(), width)
