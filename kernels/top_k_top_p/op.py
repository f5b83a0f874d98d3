"""The record of truncation. "zipf" looks like a model that knows what comes (the r-th likeliest token weighs r^-1.5), "flat" like one
that does not (normal, standard deviation 2: top-p keeps tens of thousands). Runs begin with fresh logits, whose copy is counted."""

from itertools import product

import torch

from meshlm.kernels.op import Launch, Op
from meshlm.kernels.top_k_top_p import reference
from meshlm.kernels.top_k_top_p.kernel import Limits, top_k_top_p, workspace

VOCAB = 151936
LIMITS = {  # temperature, min_p, top_k, top_p
    "off": (1.0, 0.0, 0, 1.0),
    "min_p": (1.0, 0.05, 0, 1.0),
    "top_k": (1.0, 0.0, 50, 1.0),
    "top_p": (1.0, 0.0, 0, 0.9),
    "all": (0.7, 0.01, 50, 0.9),
}


def _make(dtype: torch.dtype, device: torch.device, kind: str, lines: int, limits: str, vocab: int = VOCAB) -> Launch:
    fresh = torch.randn(lines, vocab, device=device) * 2
    if kind == "zipf":
        ranks = torch.arange(1, min(2001, vocab // 4), device=device)
        likely = torch.rand(lines, vocab, device=device).topk(len(ranks)).indices
        fresh.scatter_(1, likely, (20 - 1.5 * ranks.log()).expand(lines, -1))
    fresh = fresh.to(dtype)
    logits, rows = fresh.clone(), torch.arange(lines, dtype=torch.int32, device=device)
    scratch = workspace(lines, vocab, dtype, device)
    temperature, min_p, top_k, top_p = LIMITS[limits]
    kinds = (torch.float32, torch.float32, torch.int32, torch.float32)
    state = Limits(
        *(torch.full((lines,), one, dtype=kind, device=device) for one, kind in zip(LIMITS[limits], kinds, strict=True))
    )

    def run() -> torch.Tensor:
        logits.copy_(fresh)
        top_k_top_p(logits, rows, None, state, scratch)
        return logits

    def expected() -> torch.Tensor:
        return reference.top_k_top_p(fresh, [temperature] * lines, [min_p] * lines, [top_k] * lines, [top_p] * lines)

    beside = {"torch_sort": lambda: fresh.sort(dim=-1, descending=True), "copy": lambda: logits.copy_(fresh)}
    return Launch(run, expected, lines * vocab * fresh.element_size(), beside=beside)


OPS = (
    Op(
        "top_k_top_p", _make, [("zipf", 3, "min_p", 997), ("flat", 2, "top_k", 997)],
        list(product(("zipf", "flat"), (1, 64, 256), LIMITS)),
    ),
)  # fmt: skip
