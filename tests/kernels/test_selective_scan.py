"""Mamba's kernels against their references: decodes, prompts and chunks, and what they leave in pages."""

import pytest
import torch
import torch.nn.functional as F
from device import DEVICE, DTYPES, MARKS, ON_GPU, near
from state_requests import PAGE, STEPS, Requests, columns_of, expected, halves, split_of, states_like, whole

from meshlm.kernels.selective_scan import reference
from meshlm.kernels.selective_scan.kernel import scan_update, selective_scan

pytestmark = MARKS
CASES = [
    (37, 5, torch.float32),
    (32, 16, torch.float16),
    *((*sizes, DTYPES[2]) for sizes in ((37, 5), (70, 16)) if ON_GPU),
]


@pytest.mark.parametrize("requests", STEPS)
@pytest.mark.parametrize(("channels", "numbers", "dtype"), CASES)
def test_selective_scan(requests: Requests, channels: int, numbers: int, dtype: torch.dtype) -> None:
    """Decodes with and without a state, none at all, prompts in pieces, behind a state, with and without checkpoints."""
    torch.manual_seed(0)
    at, (decodes, pieces) = columns_of(requests), split_of(requests)
    tokens = int(at.ends[-1])
    lengths = [1, channels, channels, channels, numbers, numbers]
    wide = (torch.randn(tokens, sum(lengths), device=DEVICE) * 0.7).to(dtype)
    _, x, dt, gate, b, c = wide.split(lengths, 1)
    a, d = -torch.rand(channels, numbers, device=DEVICE) * 2, torch.randn(channels, device=DEVICE)
    states = states_like(channels, 1, numbers)
    state, out = halves(states), torch.full((tokens, channels), torch.nan, dtype=dtype, device=DEVICE)
    given = (x, dt, a, b, c, d, gate, state, out, at)
    if decodes:
        scan_update(*given, decodes, PAGE)
    if pieces is not None:
        selective_scan(*given, pieces, PAGE)

    def run(part: slice, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = (x[part].float(), F.softplus(dt[part].float()), a, b[part].float(), c[part].float(), d)
        y, after = reference.selective_scan(*inputs, None if before is None else before[:, 0])
        return y * F.silu(gate[part].float()), after[:, None]

    y, after = expected(requests, states, run)
    near(out, y, dtype, 2)
    near(whole(state, channels), after, dtype, 2)


def test_a_scan_is_its_tokens_one_by_one() -> None:
    torch.manual_seed(0)
    x, dt, a, d = torch.randn(9, 6), torch.rand(9, 6), -torch.rand(6, 4), torch.randn(6)
    b, c = torch.randn(2, 9, 4).unbind()
    state = torch.randn(6, 4)
    y, last = reference.selective_scan(x, dt, a, b, c, d, state)
    for t in range(9):
        part = slice(t, t + 1)
        one, states = reference.scan_update(x[part], dt[part], a, b[part], c[part], d, state[None])
        torch.testing.assert_close(y[t], one[0], atol=1e-5, rtol=1e-5)
        state = states[0]
    torch.testing.assert_close(last, state, atol=1e-5, rtol=1e-5)
