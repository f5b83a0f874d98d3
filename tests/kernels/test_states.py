"""Kernels with recurrent states against their references: decodes, prompts and chunks, and what they leave in pages."""

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, near

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.causal_conv import reference as conv_reference
from meshlm.kernels.causal_conv.kernel import causal_conv
from meshlm.kernels.ssd import reference as ssd_reference
from meshlm.kernels.ssd.kernel import chunk_scan
from meshlm.kernels.ssd.update import state_update
from meshlm.kernels.states import Pieces

pytestmark = MARKS
PAGE = 48
Requests = list[tuple[int, int, list[int]]]  # position, number of tokens, block table
STEPS: list[Requests] = [
    [(0, 1, [3]), (48, 1, [0, 1]), (50, 1, [5, 2]), (0, 0, [9])],
    [(7, 1, [4]), (0, 2, [5]), (0, 100, [0, 0, 1]), (48, 90, [2, 3, 6]), (20, 30, [7, 7]), (47, 2, [8, 10])],
]


def columns_of(requests: Requests) -> Columns:
    tables = torch.zeros(len(requests), 4, dtype=torch.int32)
    for row, (_, _, table) in enumerate(requests):
        tables[row, : len(table)] = torch.tensor(table)
    starts = torch.tensor([start for start, _, _ in requests], dtype=torch.int32)
    ends = torch.tensor([count for _, count, _ in requests]).cumsum(0).int()
    rows = torch.arange(len(requests), dtype=torch.int32)
    return Columns(rows.to(DEVICE), starts.to(DEVICE), ends.to(DEVICE), len(requests), tables.to(DEVICE))


def split_of(requests: Requests, most: int = 40) -> tuple[int, Pieces | None]:
    """The number of decodes, and the pieces of the rest."""
    decodes = next((n for n, (_, count, _) in enumerate(requests) if count > 1), len(requests))
    prompts = [(n, start, count) for n, (start, count, _) in enumerate(requests) if n >= decodes]
    return decodes, Pieces.of(prompts, PAGE, DEVICE, most) if prompts else None


def left(start: int, count: int, table: list[int]) -> list[tuple[int, int]]:
    """After how many tokens which page gets the state."""
    ends = [end for end in range(1, count) if (start + end) % PAGE == 0]
    found = [(end, table[(start + end - 1) // PAGE]) for end in ends]
    return [(end, page) for end, page in found if table[(start + end) // PAGE] != page] + [
        (count, table[(start + count - 1) // PAGE])
    ]


def halves(states: torch.Tensor) -> torch.Tensor:
    """[pages, lines, ...] -> [2, pages, half of the lines, ...]; an odd line too many is NaN."""
    pages, lines = states.shape[:2]
    half = -(-lines // 2)
    padded = states.new_full((pages, 2 * half, *states.shape[2:]), torch.nan)
    padded[:, :lines] = states
    return padded.view(pages, 2, half, *states.shape[2:]).transpose(0, 1).contiguous()


def whole(found: torch.Tensor, lines: int) -> torch.Tensor:
    return found.transpose(0, 1).flatten(1, 2)[:, :lines]


def states_like(*shape: int) -> torch.Tensor:
    """What no request goes on from is NaN."""
    return torch.randn(11, *shape, device=DEVICE)


@pytest.mark.parametrize("requests", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "kernel", "bias"), [(37, 4, True), (50, 2, False)])
def test_causal_conv(requests: Requests, dtype: torch.dtype, channels: int, kernel: int, bias: bool) -> None:
    torch.manual_seed(0)
    at, (decodes, pieces) = columns_of(requests), split_of(requests)
    tokens = int(at.ends[-1])
    wide = torch.randn(tokens, channels + 5, device=DEVICE).to(dtype)
    x = wide[:, 2 : 2 + channels]
    weight = torch.randn(channels, kernel, device=DEVICE).to(dtype)
    given = torch.randn(channels, device=DEVICE).to(dtype) if bias else None
    states = states_like(channels, kernel - 1).to(dtype)
    state = halves(states)
    found = causal_conv(x, weight, given, state, at, decodes, pieces, PAGE)
    expected_states = states.clone()
    begin = 0
    for start, count, table in requests:
        before = states[table[(start - 1) // PAGE]] if start else None
        for end, page in left(start, count, table) if count else []:
            y, after = conv_reference.causal_conv(x[begin : begin + end], weight, given, before)
            expected_states[page] = after
            if end == count:
                near(found[begin : begin + count], y, dtype, 2)
        begin += count
    torch.testing.assert_close(whole(state, channels), expected_states)


@pytest.mark.parametrize("requests", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "width", "numbers"), [(4, 2, 16, 16), (3, 1, 24, 40)])
def test_ssd(requests: Requests, dtype: torch.dtype, heads: int, groups: int, width: int, numbers: int) -> None:
    torch.manual_seed(0)
    at, (decodes, pieces) = columns_of(requests), split_of(requests)
    tokens = int(at.ends[-1])
    x = (torch.randn(tokens, heads * width + 3, device=DEVICE) * 0.5).to(dtype)[:, 1 : 1 + heads * width]
    x = x.unflatten(1, (heads, width))
    both = (torch.randn(tokens, 2, groups, numbers, device=DEVICE) * 0.3).to(dtype)
    b, c = both.unbind(1)
    dt = torch.rand(tokens, heads, device=DEVICE) * 0.2
    a, d = -torch.rand(heads, device=DEVICE) * 2, torch.randn(heads, device=DEVICE)
    states = states_like(heads, width, numbers)
    state, out = halves(states), torch.full((tokens, heads, width), torch.nan, dtype=dtype, device=DEVICE)
    given = (x, dt, a, b, c, d, state, out, at)
    if decodes:
        state_update(*given, decodes, PAGE)
    if pieces is not None:
        chunk_scan(*given, pieces, PAGE)
    expected_states = states.clone()
    begin = 0
    for start, count, table in requests:
        before = states[table[(start - 1) // PAGE]] if start else None
        for end, page in left(start, count, table) if count else []:
            part = slice(begin, begin + end)
            inputs = (x[part].float(), dt[part], a, b[part].float(), c[part].float(), d)
            y, after = ssd_reference.chunk_scan(*inputs, before)
            expected_states[page] = after
            if end == count:
                near(out[begin : begin + count], y, dtype, 2)
        begin += count
    near(whole(state, heads), expected_states, dtype, 2)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunks_of_a_scan_are_its_tokens_one_by_one(chunk: int) -> None:
    torch.manual_seed(0)
    x, dt = torch.randn(23, 4, 6), torch.rand(23, 4)
    a, d = -torch.rand(4), torch.randn(4)
    b, c = torch.randn(2, 23, 2, 5).unbind()
    state = torch.randn(4, 6, 5)
    y, last = ssd_reference.chunk_scan(x, dt, a, b, c, d, state, chunk)
    for t in range(23):
        one, states = ssd_reference.state_update(x[t, None], dt[t, None], a, b[t, None], c[t, None], d, state[None])
        torch.testing.assert_close(y[t], one[0], atol=1e-5, rtol=1e-5)
        state = states[0]
    torch.testing.assert_close(last, state, atol=1e-5, rtol=1e-5)
