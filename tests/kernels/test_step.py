"""The step's inputs and sampling against their references."""

import numpy as np
import pytest
import torch
from device import DEVICE, MARKS, ON_GPU

from meshlm.kernels.prepare_inputs import kernel, reference
from meshlm.kernels.sample import kernel as sampling
from meshlm.kernels.sample import reference as sampling_reference
from meshlm.kernels.sample.outcomes import NONE_LEFT, NOT_NUMBERS

pytestmark = MARKS


@pytest.mark.parametrize("groups", [1, 3])
def test_prepare_inputs(groups: int) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 1000, (9, 200), dtype=torch.int32, device=DEVICE)
    blocks = torch.randint(0, 50, (groups, 9, 13), dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([3, 7, 0, 5, 8, 8], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([17, 0, 130, 40, 0, 0], dtype=torch.int32, device=DEVICE)
    ends = torch.tensor([1, 2, 64, 130, 130, 130], dtype=torch.int32, device=DEVICE)
    ours = torch.full((2 + groups, 160), 77, dtype=torch.int64, device=DEVICE)
    theirs = torch.zeros(2 + groups, 160, dtype=torch.int64, device=DEVICE)
    for module, lines in ((kernel, ours), (reference, theirs)):
        out = (lines[0, :150], lines[1, :150], lines[2:, :150])
        module.prepare_inputs(rows, starts, ends, 6, tokens, blocks, 16, out)
    assert torch.equal(ours[:, :150], theirs[:, :150])
    assert (ours[:, 150:] == 77).all(), "nothing is written behind the tokens"


@pytest.mark.parametrize("n", [kernel.FEW, kernel.FEW + 1, 8193])
def test_prepare_inputs_finds_each_of_many_requests(n: int) -> None:
    """A token each, and two of the last."""
    tokens = torch.arange(2 * n, dtype=torch.int32, device=DEVICE).view(n, 2)
    blocks = torch.arange(n, dtype=torch.int32, device=DEVICE).view(1, n, 1)
    rows = torch.arange(n, dtype=torch.int32, device=DEVICE)
    ends = rows + 1
    ends[-1] += 1
    ids, positions, slots = (torch.empty(n + 1, dtype=torch.int64, device=DEVICE) for _ in range(3))
    kernel.prepare_inputs(rows, torch.zeros_like(rows), ends, n, tokens, blocks, 2, (ids, positions, slots[None]))
    expected = [2 * request for request in range(n)] + [2 * n - 1]
    assert ids.tolist() == slots.tolist() == expected
    assert positions.tolist() == [0] * n + [1]


def test_scatter() -> None:
    segments = [(5, 0, 3), (100, 3, 2000), (3000, 2003, 1)]
    data = torch.arange(2004, dtype=torch.int32) + 1
    updates = torch.cat((torch.tensor(segments, dtype=torch.int32).flatten(), data)).to(DEVICE)
    ours, theirs = torch.zeros(2, 4000, dtype=torch.int32, device=DEVICE)
    kernel.scatter(updates, 3, ours)
    reference.scatter(updates, 3, theirs)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("vocab", [100, 4096, 10007])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sample(vocab: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n = 24
    logits = (torch.randn(n, vocab, device=DEVICE) * 3).to(dtype)
    heats = [0.0 if i % 3 == 0 else 0.5 + i / 10 for i in range(n)]
    seeds = np.random.default_rng(0).integers(0, 2**63 - 1, n)
    prompt_lens = np.arange(n) % 5 + 1
    starts = torch.arange(n, dtype=torch.int32) + 8
    halves = torch.from_numpy(seeds.view(np.int32).reshape(n, 2).copy())
    state = sampling.Rows(
        torch.tensor(heats, device=DEVICE),
        halves.to(DEVICE),
        torch.from_numpy(prompt_lens.astype(np.int32)).to(DEVICE),
        torch.zeros(n, 64, dtype=torch.int32, device=DEVICE),
    )
    columns = (torch.arange(n), starts, torch.arange(1, n + 1))
    on_device = tuple(column.int().to(DEVICE) for column in columns)
    out = torch.zeros(n, dtype=torch.int32, device=DEVICE)
    sampling.sample(logits, on_device, None, state, sampling.workspace(n, vocab, DEVICE), out)  # type: ignore[arg-type]
    draws = [
        sampling_reference.uniform(int(seed), int(start) + 1 - int(length))
        for seed, start, length in zip(seeds, starts, prompt_lens, strict=True)
    ]
    expected = sampling_reference.sample(logits, heats, draws)
    assert out.tolist() == expected
    assert state.tokens[torch.arange(n), (starts + 1).long()].tolist() == expected
    places = torch.tensor([5, 2, 23], dtype=torch.int32, device=DEVICE)
    some = sampling.workspace(3, vocab, DEVICE)
    sampling.sample(logits[places.long()], on_device, places, state, some, out)  # type: ignore[arg-type]
    assert out[:3].tolist() == [expected[5], expected[2], expected[23]]


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # the interpreter's numpy
@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [100, 10007])
def test_lines_that_no_token_can_be_chosen_of(heat: float, vocab: int) -> None:
    """They are told from tokens; the row's next token is one of the vocabulary, since steps behind look it up."""
    logits = torch.arange(float(vocab), device=DEVICE).repeat(7, 1)
    logits[0], logits[1] = torch.nan, -torch.inf
    logits[2, vocab - 3], logits[3, 0] = torch.nan, torch.nan
    logits[4], logits[5, 7] = -torch.inf, torch.inf
    logits[4, vocab - 1] = -1e30
    nothing = torch.zeros(7, 2, dtype=torch.int32, device=DEVICE)
    heats = torch.full((7,), heat, device=DEVICE)
    state = sampling.Rows(heats, nothing, nothing[:, 0].contiguous(), torch.full_like(nothing, 5))
    columns = (torch.arange(7), torch.zeros(7), torch.arange(1, 8))
    on_device = tuple(column.int().to(DEVICE) for column in columns)
    out = torch.zeros(7, dtype=torch.int32, device=DEVICE)
    sampling.sample(logits, on_device, None, state, sampling.workspace(7, vocab, DEVICE), out)  # type: ignore[arg-type]
    infinite = 7 if heat == 0 else NOT_NUMBERS
    assert out[:6].tolist() == [NOT_NUMBERS, NONE_LEFT, NOT_NUMBERS, NOT_NUMBERS, vocab - 1, infinite]
    assert 0 <= int(out[6]) < vocab
    assert sampling_reference.sample(logits[:6], [heat] * 6, [0.5] * 6) == out[:6].tolist()
    assert state.tokens[:6, 1].tolist() == [0, 0, 0, 0, vocab - 1, max(infinite, 0)]


def test_draws_are_those_of_the_host() -> None:
    from meshlm.workers.output.sampler import uniforms

    seeds, index = np.array([0, 1, 2**63 - 1, 12345678901234], np.uint64), np.array([0, 3, 100, 7])
    ours = [sampling_reference.uniform(int(seed), int(i)) for seed, i in zip(seeds, index, strict=True)]
    assert ours == uniforms(seeds, index).tolist()


def test_temperature_one_follows_the_distribution() -> None:
    """Many draws from four tokens, within five standard deviations."""
    n, weights = 10000 if ON_GPU else 200, torch.tensor([0.1, 0.2, 0.3, 0.4])
    logits = weights.log().expand(n, 4).contiguous().to(DEVICE)
    seeds = np.random.default_rng(3).integers(0, 2**63 - 1, n)
    state = sampling.Rows(
        torch.ones(n, device=DEVICE),
        torch.from_numpy(seeds.view(np.int32).reshape(n, 2).copy()).to(DEVICE),
        torch.ones(n, dtype=torch.int32, device=DEVICE),
        torch.zeros(n, 4, dtype=torch.int32, device=DEVICE),
    )
    columns = tuple(column.int().to(DEVICE) for column in (torch.arange(n), torch.zeros(n), torch.arange(1, n + 1)))
    out = torch.zeros(n, dtype=torch.int32, device=DEVICE)
    sampling.sample(logits, columns, None, state, sampling.workspace(n, 4, DEVICE), out)  # type: ignore[arg-type]
    counts = torch.bincount(out.cpu().long(), minlength=4) / n
    assert (counts - weights).abs().max() < 5 * (0.25 / n) ** 0.5
