"""Kernels with recurrent states against their references: decodes, prompts and chunks, and what they leave in pages."""

import pytest
import torch
from device import DEVICE, DTYPES, MARKS, near
from hypothesis import given, settings
from hypothesis import strategies as st
from state_requests import PAGE, STEPS, Requests, columns_of, halves, left, split_of, states_like, whole

from meshlm.kernels.attention.kernel import Columns
from meshlm.kernels.causal_conv import reference as conv_reference
from meshlm.kernels.causal_conv.kernel import causal_conv
from meshlm.kernels.ssd import kernel as ssd_kernel
from meshlm.kernels.ssd import reference as ssd_reference
from meshlm.kernels.ssd.kernel import chunk_scan
from meshlm.kernels.ssd.update import state_update
from meshlm.kernels.states import MOST_PROMPTS, Pieces

pytestmark = MARKS


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
    shift = torch.randn(channels, device=DEVICE).to(dtype) if bias else None
    states = states_like(channels, kernel - 1).to(dtype)
    state = halves(states)
    found = causal_conv(x, weight, shift, state, at, decodes, pieces, PAGE)
    expected_states = states.clone()
    begin = 0
    for start, count, table in requests:
        before = states[table[(start - 1) // PAGE]] if start else None
        for end, page in left(start, count, table) if count else []:
            y, after = conv_reference.causal_conv(x[begin : begin + end], weight, shift, before)
            expected_states[page] = after
            if end == count:
                near(found[begin : begin + count], y, dtype, 2)
        begin += count
    torch.testing.assert_close(whole(state, channels), expected_states)


@pytest.mark.parametrize("requests", STEPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "limit"), [((4, 2, 16, 16), None), ((3, 1, 24, 40), 0.2)])
def test_ssd(requests: Requests, dtype: torch.dtype, sizes: tuple[int, int, int, int], limit: float | None) -> None:
    """Of two heads in a program, and of one."""
    heads, groups, width, numbers = sizes
    assert ssd_kernel._heads_of_a_program(heads // groups) == (2 if groups == 2 else 1)
    torch.manual_seed(0)
    at, (decodes, pieces) = columns_of(requests), split_of(requests)
    tokens = int(at.ends[-1])
    x = (torch.randn(tokens, heads * width + 3, device=DEVICE) * 0.5).to(dtype)[:, 1 : 1 + heads * width]
    x = x.unflatten(1, (heads, width))
    both = (torch.randn(tokens, 2, groups, numbers, device=DEVICE) * 0.3).to(dtype)
    b, c = both.unbind(1)
    raw = torch.randn(tokens, heads + 3, device=DEVICE).to(dtype)[:, 2 : 2 + heads]
    steps = ssd_reference.TimeSteps(raw, torch.randn(heads, device=DEVICE) - 2, 0.01, limit)
    dt = steps.values()
    a, d = -torch.rand(heads, device=DEVICE) * 2, torch.randn(heads, device=DEVICE)
    states = states_like(heads, width, numbers)
    state, out = halves(states), torch.full((tokens, heads, width), torch.nan, dtype=dtype, device=DEVICE)
    given = (x, steps, a, b, c, d, state, out, at)
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


@given(
    requests=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 300)), min_size=1, max_size=7),
    page=st.sampled_from([16, 48, 128, 200]),
    padding=st.integers(0, 3),
)
@settings(max_examples=40, deadline=None)  # the first one compiles
def test_the_device_cuts_prompts_as_the_host_does(requests: list[tuple[int, int]], page: int, padding: int) -> None:
    """Those with one token or none are no prompts; what is left of the room are pieces without tokens."""
    starts = torch.tensor([start for start, _ in requests] + [0] * padding, dtype=torch.int32)
    ends = torch.tensor([count for _, count in requests] + [0] * padding).cumsum(0).int()
    at = Columns(torch.zeros_like(starts), starts.to(DEVICE), ends.to(DEVICE), len(starts), torch.zeros(1, 1))
    found = Pieces.of_columns(at, int(ends[-1]) + padding, page)
    prompts = [(nth, start, count) for nth, (start, count) in enumerate(requests) if count > 1]
    wanted = Pieces.of_prompts(prompts, page, DEVICE)
    for own, theirs in zip(found, wanted, strict=True):
        assert own[: len(theirs)].tolist() == theirs.tolist()
        assert not own[len(theirs) :].any()


def test_there_is_room_for_the_most_pieces() -> None:
    """The worst that fits a graph: prompts of two tokens, each on both sides of a block's end."""
    requests = [(15, 2)] * MOST_PROMPTS
    starts = torch.tensor([start for start, _ in requests], dtype=torch.int32)
    ends = torch.arange(1, MOST_PROMPTS + 1, dtype=torch.int32) * 2
    at = Columns(torch.zeros_like(starts), starts.to(DEVICE), ends.to(DEVICE), MOST_PROMPTS, torch.zeros(1, 1))
    found = Pieces.of_columns(at, 2 * MOST_PROMPTS, 16)
    wanted = Pieces.of_prompts([(nth, *one) for nth, one in enumerate(requests)], 16, DEVICE)
    assert found.pieces[: 2 * MOST_PROMPTS].tolist() == wanted.pieces.tolist()
    assert found.prompts.tolist() == wanted.prompts.tolist()
