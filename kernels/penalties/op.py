"""The record of penalties: lines, those of them that have some, and tokens of each. With none it is what every other step pays."""

import torch

from meshlm.kernels.op import Launch, Op
from meshlm.kernels.penalties import reference
from meshlm.kernels.penalties.kernel import Edits, Penalties, penalise, workspace

VOCAB = 151936
FACTOR, ONCE, EACH = 1.001, 0.001, 0.001


def _make(dtype: torch.dtype, device: torch.device, lines: int, num: int, length: int, vocab: int = VOCAB) -> Launch:
    logits = torch.randn(lines, vocab, device=device).to(dtype)
    tokens = torch.randint(0, vocab, (lines, max(16, length)), dtype=torch.int32, device=device)
    rows = torch.arange(lines, dtype=torch.int32, device=device)
    columns, own = (rows, torch.full_like(rows, length - 1), rows + 1), (rows < num).float()
    state = Penalties(1 + (FACTOR - 1) * own, ONCE * own, EACH * own)
    nothing = torch.zeros(lines, 16, dtype=torch.int32, device=device)
    edits = Edits(torch.zeros_like(rows), nothing, nothing.float(), nothing)
    prompts, counts = torch.full_like(rows, length // 2), workspace(lines, vocab, device)

    def run() -> torch.Tensor:
        penalise(logits, columns, None, state, edits, prompts, tokens, counts)
        return logits

    def expected() -> torch.Tensor:
        texts = [line[:length] if n < num else [] for n, line in enumerate(tokens.tolist())]
        before, said = [text[: length // 2] for text in texts], [text[length // 2 :] for text in texts]
        return reference.penalise(logits, before, said, [FACTOR] * lines, [ONCE] * lines, [EACH] * lines, [[]] * lines)

    def by_torch() -> None:
        ids, part = tokens[:num, :length].long(), logits[:num].float()
        said = torch.zeros(num, vocab, device=device).scatter_add_(1, ids, torch.ones(ids.shape, device=device))
        part = torch.where(said > 0, torch.where(part > 0, part / FACTOR, part * FACTOR), part)
        logits[:num] = (part - EACH * said - ONCE * (said > 0)).to(dtype)

    return Launch(run, expected, beside={"torch": by_torch} if num else {})


OPS = (
    Op(
        "penalise", _make, [(3, 2, 40, 101), (70, 70, 9, 64)],
        [(1, 0, 0), (256, 0, 0), (1, 1, 1024), (1, 1, 32768), (64, 64, 1024), (256, 1, 4096), (256, 256, 1024), (256, 256, 4096)],
    ),
)  # fmt: skip
