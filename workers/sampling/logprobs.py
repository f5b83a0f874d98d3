"""Log-probabilities of sampled and prompt tokens: of the model's raw logits, before any sampling parameter (vLLM's default)."""

import torch
from torch import Tensor

from meshlm.protocol.token_edge import LogprobColumns


def columns(logits: Tensor, token_ids: Tensor, width: int) -> LogprobColumns:
    """For logits [p, vocab] and the tokens [p] that came: logprob, rank, and the `width` likeliest."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    top = logprobs.topk(width, dim=-1) if width else None
    return LogprobColumns(
        width=width,
        logprobs=own.squeeze(1).cpu().numpy().astype("float32").tobytes(),
        ranks=ranks.to(torch.int32).cpu().numpy().tobytes(),
        top_ids=top.indices.to(torch.int32).cpu().numpy().tobytes() if top else b"",
        top_logprobs=top.values.cpu().numpy().astype("float32").tobytes() if top else b"",
    )
