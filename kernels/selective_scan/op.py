"""The records of Mamba's scan: decodes beside a copy of their states, prompts, whose rate counts an exponential of each number of the
state of each token. Channels of Mamba-2.8B and Falcon-Mamba-7B."""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.op import Case, Launch, Op
from meshlm.kernels.selective_scan import reference
from meshlm.kernels.selective_scan.kernel import scan_update, selective_scan
from meshlm.kernels.states import StateStep

NUMBERS, PAGE, CHANNELS = 16, 1056, (5120, 8192)


def _make(
    dtype: torch.dtype, device: torch.device, counts: tuple[int, ...], channels: int, numbers: int = NUMBERS,
    page: int = PAGE, kept: torch.dtype | None = None,
) -> Launch:  # fmt: skip
    """kept: the dtype of states."""
    step = StateStep(counts, page, device)
    x, dt, gate = (torch.randn(3, step.tokens, channels, device=device) * 0.7).to(dtype).unbind()
    b, c = torch.randn(2, step.tokens, numbers, device=device).to(dtype).unbind()
    a, d = -torch.rand(channels, numbers, device=device) * 4, torch.randn(channels, device=device)
    state, out = step.states(channels, 1, numbers, dtype=kept or dtype), torch.empty_like(x)

    def of_one(part: slice, before: Tensor | None) -> Tensor:
        inputs = x[part].float(), F.softplus(dt[part].float()), a, b[part].float(), c[part].float(), d
        y, _ = reference.selective_scan(*inputs, None if before is None else before[:, 0])
        return y * F.silu(gate[part].float())

    theirs: dict[str, Callable[[], object]] = {}
    if len(counts) == 1 and find_spec("mamba_ssm") is not None:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn  # type: ignore[import-not-found]

        lines, steps, keys, queries, gates = (one.t().contiguous()[None] for one in (x, dt, b, c, gate))
        theirs["mamba_ssm"] = lambda: selective_scan_fn(
            lines, steps, a, keys, queries, d, gates, delta_softplus=True, return_last_state=True
        )
    given = x, dt, a, b, c, d, gate, state, out
    flop = step.tokens * channels * numbers
    return step.launch((scan_update, selective_scan), given, of_one, channels, flop, theirs)


DECODES: list[Case] = [
    ((1,) * n, channels, NUMBERS, PAGE, kept)
    for channels, kept, n in product(CHANNELS, (torch.bfloat16, torch.float32), (1, 16, 64, 256))
]
PROMPTS: list[Case] = [
    (counts, channels) for channels in CHANNELS for counts in ((256,), (2048,), (2048,) * 4, (8192,))
]
OPS = (
    Op("scan_update", _make, [((1, 1, 1), 37, 5, 48), ((1,), 32, 16, 48)], DECODES, near=2),
    Op("selective_scan", _make, [((40, 3, 100), 37, 5, 48), ((90,), 32, 16, 48)], PROMPTS, near=2),
)
