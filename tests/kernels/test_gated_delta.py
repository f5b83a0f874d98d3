"""The gated delta rule's kernels against their references: decodes, prompts and chunks, and what they leave in pages."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from device import DEVICE, DTYPES, MARKS, ON_GPU, near
from state_requests import PAGE, STEPS, Requests, columns_of, expected, halves, split_of, states_like, whole

from meshlm.kernels.gated_delta import reference
from meshlm.kernels.gated_delta.kernel import chunk_rule
from meshlm.kernels.gated_delta.update import rule_update

pytestmark = MARKS


class Given(NamedTuple):
    """What the kernels take."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    rate: torch.Tensor
    bias: torch.Tensor


def inputs(tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Given:
    """Parts of wider lines, then rates and biases."""
    groups, heads, numbers, width = sizes
    lengths = [1, groups * numbers, groups * numbers, heads * width, heads, heads]
    _, q, k, v, a, b = (torch.randn(tokens, sum(lengths), device=DEVICE) * 0.7).to(dtype).split(lengths, 1)
    rate, bias = -torch.rand(heads, device=DEVICE) * 2, torch.randn(heads, device=DEVICE) - 2
    query, key = (each.unflatten(1, (groups, numbers)) for each in (q, k))
    return Given(query, key, v.unflatten(1, (heads, width)), a, b, rate, bias)


def by_reference(requests: Requests, given: Given, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and the states by page."""
    q, k, v, a, b, rate, bias = given
    each = v.shape[1] // k.shape[1]
    query, key = reference.unit(q, each) * q.shape[2] ** -0.5, reference.unit(k, each)
    g, beta = reference.gates(a, b, rate, bias)

    def some(part: slice, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.chunk_rule(query[part], key[part], v[part].float(), g[part], beta[part], before)

    return expected(requests, states, some)


def run(requests: Requests, given: Given, state: torch.Tensor, most: int) -> torch.Tensor:
    """What the kernels give; the state is changed."""
    at, (decodes, pieces) = columns_of(requests), split_of(requests, most)
    out = torch.full(given[2].shape, torch.nan, dtype=given[2].dtype, device=DEVICE)
    if decodes:
        rule_update(*given, state, out, at, decodes, PAGE)
    if pieces is not None:
        chunk_rule(*given, state, out, at, pieces, PAGE)
    return out


SIZES = (
    {"groups": (1, 2, 32, 64), "odd sizes": (2, 2, 36, 72)}
    if ON_GPU
    else {"groups": (1, 2, 16, 8), "odd sizes": (2, 2, 20, 40)}
)
CASES = [("groups", torch.float32), ("odd sizes", torch.float16), *((name, DTYPES[2]) for name in SIZES if ON_GPU)]


@pytest.mark.parametrize("requests", STEPS)
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_gated_delta(requests: Requests, name: str, dtype: torch.dtype) -> None:
    """Decodes with and without a state, none at all, prompts in pieces, behind a state, with and without checkpoints."""
    torch.manual_seed(0)
    _, heads, numbers, width = SIZES[name]
    given = inputs(sum(count for _, count, _ in requests), SIZES[name], dtype)
    states = states_like(heads, width, numbers)
    state = halves(states)
    found = run(requests, given, state, 40)
    y, after = by_reference(requests, given, states)
    near(found, y, dtype, 2)
    near(whole(state, heads), after, dtype, 2)


@pytest.mark.parametrize("decay", [0.0, -30.0], ids=["nothing fades", "all fades"])
def test_chunks_of_equal_keys(decay: float) -> None:
    """Then the triangular system is as far from being diagonal as can be: powers of it would be huge. Pieces as long as they get."""
    torch.manual_seed(0)
    requests = [(3, 45, [0]), (PAGE, 47, [1, 2])]
    q, k, v, a, b, _, _ = inputs(92, (1, 2, 32, 32), torch.float32)
    k = k[:1].expand(92, -1, -1).contiguous()
    rate, bias = torch.full((2,), decay, device=DEVICE), torch.zeros(2, device=DEVICE)
    given = Given(q, k, v, a, b + 6, rate, bias)
    states = states_like(2, 32, 32)
    state = halves(states)
    found = run(requests, given, state, 128)
    y, after = by_reference(requests, given, states)
    near(found, y, torch.float32, 5)
    near(whole(state, 2), after, torch.float32, 5)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunks_are_the_tokens_one_by_one(chunk: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(23, 4, 6), F.normalize(torch.randn(23, 4, 6), dim=2), torch.randn(23, 4, 5)
    g, beta, state = -torch.rand(23, 4), torch.rand(23, 4), torch.randn(4, 5, 6)
    o, last = reference.chunk_rule(q, k, v, g, beta, state, chunk)
    for t in range(23):
        part = slice(t, t + 1)
        one, states = reference.rule_update(q[part], k[part], v[part], g[part], beta[part], state[None])
        torch.testing.assert_close(o[t], one[0], atol=1e-5, rtol=1e-5)
        state = states[0]
    torch.testing.assert_close(last, state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prompt", [False, True])
def test_numbers_apart_are_refused(prompt: bool) -> None:
    """As they are where a and b were taken from the same lines in turn."""
    given = inputs(4, SIZES["groups"], torch.float32)
    given = given._replace(a=torch.zeros(4, 4, device=DEVICE)[:, ::2])
    rest: list[Any] = [torch.empty(0)] * 3
    kernel: Any = chunk_rule if prompt else rule_update
    with pytest.raises(ValueError, match="a of a token must lie in one piece"):
        kernel(*given, *rest, None, PAGE)
