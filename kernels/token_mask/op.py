"""The record of grammars' masks: lines, and those of them that have a mask, in which a token in a hundred may come."""

import torch

from meshlm.kernels.op import Launch, Op
from meshlm.kernels.token_mask import reference
from meshlm.kernels.token_mask.kernel import token_mask

VOCAB = 151936


def _make(dtype: torch.dtype, device: torch.device, lines: int, num: int, vocab: int = VOCAB) -> Launch:
    logits = torch.randn(lines, vocab, device=device).to(dtype)
    bits = torch.rand(max(1, num), -(-vocab // 32), 32, device=device) < 0.01
    words = (bits.long() << torch.arange(32, device=device)).sum(-1).to(torch.int32)
    which = torch.arange(lines, dtype=torch.int32, device=device)
    which[num:] = -1

    def run() -> torch.Tensor:
        token_mask(logits, which, words)
        return logits

    def expected() -> torch.Tensor:
        return reference.token_mask(logits, which.tolist(), words.tolist())

    return Launch(run, expected, 2 * num * vocab * logits.element_size())


OPS = (
    Op(
        "token_mask",
        _make,
        [(5, 3, 101), (3, 0, 64), (7, 7, 9000)],
        exact=1,
        of_models=[(1, 1), (64, 0), (64, 20), (64, 64), (256, 256)],
    ),
)  # fmt: skip
