"""The records of Mamba-2's state space: decodes beside a copy of their states, prompts by their products in pieces."""

from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from torch import Tensor

from meshlm.kernels.op import Case, Launch, Op
from meshlm.kernels.ssd import reference
from meshlm.kernels.ssd.kernel import chunk_scan
from meshlm.kernels.ssd.reference import TimeSteps
from meshlm.kernels.ssd.update import state_update
from meshlm.kernels.states import PIECE, StateStep

Sizes = tuple[int, int, int, int]  # heads, P, N, groups
BAMBA, NEMOTRON = (128, 64, 128, 1), (128, 64, 128, 8)
PAGE, THEIR_CHUNK = 1056, 256


def _make(
    dtype: torch.dtype, device: torch.device, counts: tuple[int, ...], sizes: Sizes, page: int = PAGE,
    kept: torch.dtype | None = None,
) -> Launch:  # fmt: skip
    """kept: the dtype of states."""
    heads, width, numbers, groups = sizes
    step = StateStep(counts, page, device)
    x = torch.randn(step.tokens, heads, width, device=device).to(dtype)
    b, c = (torch.randn(2, step.tokens, groups, numbers, device=device) * 0.3).to(dtype).unbind()
    steps = TimeSteps(torch.randn(step.tokens, heads, device=device).to(dtype) - 3, torch.zeros(heads, device=device))
    a, d = -torch.rand(heads, device=device), torch.randn(heads, device=device)
    state, out = step.states(heads, width, numbers, dtype=kept or dtype), torch.empty_like(x)
    dt = steps.values()

    def of_one(part: slice, before: Tensor | None) -> Tensor:
        return reference.chunk_scan(x[part].float(), dt[part], a, b[part].float(), c[part].float(), d, before)[0]

    flop = 2 * heads * step.tokens * (PIECE * (numbers + width) + 2 * numbers * width)
    theirs = _theirs(x, steps, a, b, c, d) if len(counts) == 1 else {}
    given = x, steps, a, b, c, d, state, out
    return step.launch((state_update, chunk_scan), given, of_one, heads, flop, theirs)


def _theirs(x: Tensor, steps: TimeSteps, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> dict[str, Any]:
    """mamba_ssm's kernel, where that package is installed."""
    if find_spec("mamba_ssm") is None:
        return {}
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # type: ignore[import-not-found]

    given = (x[None], steps.values()[None], a, b[None], c[None], THEIR_CHUNK)
    return {"mamba_ssm": lambda: mamba_chunk_scan_combined(*given, d)}


DECODES: list[Case] = [
    ((1,) * n, sizes, PAGE, kept)
    for sizes, kept, n in product((BAMBA, NEMOTRON), (torch.bfloat16, torch.float32), (1, 16, 64, 256))
]
PROMPTS: list[Case] = [((tokens,), sizes) for sizes in (BAMBA, NEMOTRON) for tokens in (256, 2048, 8192)]
OPS = (
    Op("state_update", _make, [((1, 1, 1), (3, 24, 40, 1), 48), ((1, 1), (4, 16, 16, 2), 48)], DECODES, near=2),
    Op("chunk_scan", _make, [((40, 3, 100), (4, 16, 16, 2), 48), ((90,), (3, 24, 40, 1), 48)], PROMPTS, near=2),
)
