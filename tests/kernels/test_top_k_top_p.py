"""Truncation against a reference that sorts, and against the general sampler."""

import numpy as np
import pytest
import torch
from device import DEVICE, DTYPES, MARKS, ON_GPU
from torch import Tensor

from meshlm.kernels.top_k_top_p import kernel, reference
from meshlm.workers.output.sampler import _top_k_top_p
from meshlm.workers.rows.columns import RowColumns

pytestmark = MARKS
INF = float("inf")
Parameters = tuple[float, float, int, float]  # temperature, min_p, top_k, top_p
OFF: Parameters = (1.0, 0.0, 0, 1.0)
SHAPES = (
    {} if ON_GPU else {"block": 4096, "tile": 64}  # the interpreter's time is that of its turns
)  # small ones for the interpreter, whose time is that of the padding


def limits(parameters: list[Parameters]) -> kernel.Limits:
    heat, min_p, top_k, top_p = zip(*parameters, strict=True)
    return kernel.Limits(
        torch.tensor(heat, dtype=torch.float32, device=DEVICE),
        torch.tensor(min_p, dtype=torch.float32, device=DEVICE),
        torch.tensor(top_k, dtype=torch.int32, device=DEVICE),
        torch.tensor(top_p, dtype=torch.float32, device=DEVICE),
    )


def top_k_top_p(logits: Tensor, parameters: list[Parameters]) -> Tensor:
    """A truncated copy."""
    out = logits.clone()
    lines, vocab = logits.shape
    rows = torch.arange(lines, dtype=torch.int32, device=DEVICE)
    scratch = kernel.workspace(lines, vocab, logits.dtype, DEVICE)
    kernel.top_k_top_p(out, rows, None, limits(parameters), scratch, **SHAPES)
    return out


def check(logits: Tensor, parameters: list[Parameters]) -> Tensor:
    """What the kernel keeps is what the reference keeps, up to the rounding of float32 sums in top_p, and unchanged."""
    got = top_k_top_p(logits, parameters)
    low, high = (
        reference.top_k_top_p(
            logits,
            [p[0] for p in parameters],
            [p[1] for p in parameters],
            [p[2] for p in parameters],
            [p[3] + shift if p[3] < 1 else 1.0 for p in parameters],
        )
        for shift in (-3e-6, 3e-6)
    )
    kept = got > -INF
    assert bool((kept >= (low > -INF)).all())
    assert bool((kept <= (high > -INF)).all())
    assert torch.equal(got[kept], logits[kept])
    return got


def counts(truncated: Tensor) -> list[int]:
    return [int(n) for n in (truncated > -INF).sum(dim=-1)]


@pytest.mark.parametrize("vocab", [97, 6007])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_and_all(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab)
    parameters: list[Parameters] = [
        (1.0, 0.05, 0, 1.0),
        (0.7, 0.0, 50, 1.0),
        (1.0, 0.0, 0, 0.9),
        (2.0, 0.0, 0, 0.3),
        (0.8, 0.02, 40, 0.8),
        (1.2, 0.001, 0, 0.95),
        (0.5, 0.0, 7, 0.99),
        (1.0, 0.1, 3, 1.0),
    ]
    logits = (torch.randn(len(parameters), vocab, device=DEVICE) * 3).to(dtype)
    assert min(counts(check(logits, parameters))) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_limit_nothing_or_are_greedy_stay(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    parameters: list[Parameters] = [
        OFF,
        (0.0, 0.5, 1, 0.1),
        (1.3, -1.0, -1, 1.0),
        (1.0, 0.0, 5, 1.0),
        (1.0, 0.0, 1001, 1.0),
    ]
    logits = torch.randn(5, 1001, device=DEVICE).to(dtype)
    logits[1, 3], logits[0, 5] = INF, float("nan")
    got = top_k_top_p(logits, parameters)
    untouched = [0, 1, 2, 4]
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(got[untouched].view(whole), logits[untouched].view(whole))
    assert counts(got[3:4]) == [5]


def test_ties_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, -0.0, 2.0, 0.0, 2.0]], device=DEVICE).expand(5, 8).contiguous()
    parameters: list[Parameters] = [
        (1.0, 0.0, 1, 1.0),
        (1.0, 0.0, 3, 1.0),
        (1.0, 0.0, 0, 0.3),
        (1.0, 0.0, 0, 0.7),
        (1.0, 0.0, 7, 1.0),
    ]
    assert counts(check(logits, parameters)) == [2, 5, 2, 5, 8]


def test_equal_logits_all_stay() -> None:
    for value in (0.0, -7.5, 11.0):
        logits = torch.full((4, 300), value, device=DEVICE)
        found = counts(
            check(logits, [(1.0, 0.9, 0, 1.0), (1.0, 0.0, 10, 1.0), (1.0, 0.0, 0, 0.01), (0.1, 0.5, 2, 0.5)])
        )
        assert found == [300] * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_limits_keep_the_likeliest(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    parameters: list[Parameters] = [(1.0, 0.0, 1, 1.0), (1.0, 0.0, 0, 1e-6), (1.0, 1.0, 0, 1.0), (5.0, 1.0, 1, 1e-9)]
    logits = torch.randn(4, 2000, device=DEVICE).to(dtype)
    logits[:, 1234] = 9
    got = top_k_top_p(logits, parameters)
    assert counts(got) == [1] * 4
    assert got.argmax(dim=-1).tolist() == [1234] * 4


def test_loose_limits_keep_nearly_all() -> None:
    """More than the peaks of the groups can prove: the bounds fall back to the whole line."""
    torch.manual_seed(3)
    logits = torch.randn(4, 3001, device=DEVICE)
    got = check(logits, [(1.0, 0.0, 3000, 1.0), (3.0, 0.0, 0, 0.999), (1.0, 1e-9, 2500, 0.99), (1e4, 0.0, 0, 0.9999)])
    assert counts(got)[0] == 3000
    assert counts(got)[3] >= 3000


def test_logits_that_are_minus_infinity() -> None:
    """Allowed ids alone remain: fewer than top_k, in few groups. A line without any token stays as it is."""
    torch.manual_seed(4)
    logits = torch.full((5, 1000), -INF, device=DEVICE)
    logits[:4, 500:520] = torch.randn(4, 20, device=DEVICE)
    got = check(logits[:4], [(1.0, 0.0, 50, 1.0), (1.0, 0.0, 0, 0.9), (1.0, 0.2, 30, 0.9), (1.0, 0.0, 5, 1.0)])
    assert counts(got)[0] == 20
    assert counts(got)[3] == 5
    for one in ((1.0, 0.0, 50, 1.0), (1.0, 0.0, 0, 0.9), (1.0, 0.2, 30, 0.9)):
        assert counts(top_k_top_p(logits[4:], [one])) == [0]


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's numpy
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spoilt", [float("nan"), INF])
def test_a_line_with_what_is_no_number_stays_so(dtype: torch.dtype, spoilt: float) -> None:
    """Else it would be drawn from as if the model were sound (kernels/sample says that it is not)."""
    torch.manual_seed(6)
    parameters: list[Parameters] = [(1.0, 0.0, 5, 1.0), (0.7, 0.0, 0, 0.9), (1.0, 0.2, 0, 1.0), (1.0, 0.1, 9, 0.5)]
    logits = torch.randn(4, 1001, device=DEVICE).to(dtype)
    logits[:, 700] = spoilt
    got = top_k_top_p(logits, parameters)
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(got.view(whole), logits.view(whole))


def test_rows_are_found_by_place() -> None:
    """Lines 0 and 1 belong to requests 2 and 0, which live in rows 1 and 4. The stride is not the vocabulary's size."""
    torch.manual_seed(5)
    wide = torch.randn(2, 600, device=DEVICE)
    logits = wide[:, :555]
    expected = wide.clone()
    state = limits([OFF, (1.0, 0.0, 3, 1.0), OFF, OFF, (1.0, 0.0, 8, 1.0)])
    rows = torch.tensor([4, 0, 1, 3], dtype=torch.int32, device=DEVICE)
    places = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    kernel.top_k_top_p(logits, rows, places, state, kernel.workspace(2, 555, logits.dtype, DEVICE), **SHAPES)
    expected[:, :555] = reference.top_k_top_p(expected[:, :555], [1.0, 1.0], [0.0, 0.0], [3, 8], [1.0, 1.0])
    assert torch.equal(wide, expected)


def test_the_sampler_agrees() -> None:
    """workers/output excludes the same tokens of logits that are all different."""
    torch.manual_seed(6)
    parameters: list[Parameters] = [
        OFF,
        (0.9, 0.0, 20, 1.0),
        (1.5, 0.0, 0, 0.7),
        (1.0, 0.01, 0, 1.0),
        (0.8, 0.005, 25, 0.9),
    ]
    table = RowColumns(len(parameters))
    for name, values in zip(("temperature", "min_p", "top_k", "top_p"), np.array(parameters).T, strict=True):
        table[name][:] = values
    logits = torch.randn(len(parameters), 5000, device=DEVICE) * 2
    scaled = logits / torch.from_numpy(table["temperature"]).to(DEVICE)[:, None]
    _top_k_top_p(scaled, np.arange(len(parameters), dtype=np.int32), table)
    assert torch.equal(top_k_top_p(logits, parameters) > -INF, scaled > -INF)
