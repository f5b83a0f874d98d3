"""Log-probabilities of sampled and prompt tokens: of the model's raw logits, before any sampling parameter (vLLM's default).

Computed in chunks of LINES: a chunk's float32 temporaries are about 11 bytes for each of its logits, and a prompt may have thousands.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshlm.protocol.token_edge import LogprobColumns

LINES = 64


def packed(logits: Tensor, token_ids: Tensor, width: int) -> Tensor:
    """For logits [p, vocab] and the tokens int64 [p] that came: logprob, rank, and the `width` likeliest (ids, then logprobs).

    int32 [p, 2 + 2 width] on their device, float32 by its bits: one copy brings all to the host.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > own).sum(dim=-1, keepdim=True) + 1
    parts = [own.view(torch.int32), ranks.int()]
    if width:
        top = logprobs.topk(width, dim=-1)
        parts += [top.indices.int(), top.values.view(torch.int32)]
    return torch.cat(parts, dim=1)


def in_chunks(hidden: Tensor, token_ids: Tensor, width: int, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
    """`packed` of the logits of hidden states [p, hidden], with those of LINES positions in memory at a time."""
    parts = [
        packed(logits_of(hidden[begin : begin + LINES]), token_ids[begin : begin + LINES], width)
        for begin in range(0, len(token_ids), LINES)
    ]
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
