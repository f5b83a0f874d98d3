"""Where drafted tokens stand and which of them stay: against plain Python, at odd shapes."""

import numpy as np
import pytest
import torch
from device import DEVICE, MARKS
from torch import Tensor

from meshlm.kernels.verify import kernel, reference
from meshlm.workers.output.sampler import uniforms

pytestmark = MARKS
WIDTH, NUM_ROWS = 3000, 9


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rows_of_text(seed: int, alphabet: int = 3) -> tuple[Tensor, Tensor]:
    """Tokens of all rows, and how many are known: of one row none but one, of another 2,500."""
    torch.manual_seed(seed)
    tokens = torch.randint(0, alphabet, (NUM_ROWS, WIDTH), dtype=torch.int32, device=DEVICE)
    return tokens, ints(1, 2, 5, 40, 1024, 1025, 2500, 17, 3)


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (2, 4), (5, 5), (1, 20)])
def test_ngram(shortest: int, longest: int) -> None:
    """Rows in any order; one that drafts nothing; a text without a match keeps what stands behind it."""
    ours, known = rows_of_text(shortest)
    ours[3, :40] = torch.arange(40, device=DEVICE)
    theirs = ours.clone()
    rows, drafts = ints(6, 3, 4, 5, 0, 1, 2, 7), ints(15, 3, 0, 7, 2, 4, 9, 1)
    found = [torch.full((8,), 77, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    kernel.ngram(rows, drafts, known, ours, found[0], 8, shortest, longest)
    reference.ngram(rows, drafts, known, theirs, found[1], 8, shortest, longest)
    assert torch.equal(ours, theirs)
    assert torch.equal(found[0], found[1])
    assert found[0][1] == found[0][2] == found[0][4] == 0


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    tokens, known = rows_of_text(0)
    tokens[2, :5] = ints(8, 9, 7, 9, 7)
    kernel.ngram(ints(2), ints(6), known, tokens, ints(0), 1, 2, 4)
    assert tokens[2, 5:11].tolist() == [9, 7, 9, 7, 9, 7]


def placed(module: object) -> tuple[Tensor, Tensor, Tensor]:
    tokens, known = rows_of_text(3)
    own, starts, entries = ints(-1, 4, -1, -1), torch.full((12,), 5, dtype=torch.int32, device=DEVICE), ints(*[6] * 12)
    module.place(ints(5, 2, 8, 1), ints(3, 4, 9, 9), known, tokens, own, starts, entries, 4)  # type: ignore[attr-defined]
    return own, starts, entries


def test_place() -> None:
    """Decodes at their rows' ends, one where the host says, and a prompt, which has no entries."""
    ours, theirs = placed(kernel), placed(reference)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    assert ours[0].tolist() == [1024, 4, 2, 1]
    assert ours[1].tolist() == [1024, 1025, 1026, 4, 2, 3, 4, 5, 6, 5, 5, 5], "nothing is written behind the entries"


CASES = {
    "all": ([7, 8, 9, 4], 4),
    "none": ([1, 8, 9, 4], 1),
    "some": ([7, 8, 1, 4], 3),
    "an outcome": ([7, -1, 9, 4], 2),
}


@pytest.mark.parametrize("case", CASES)
def test_accept(case: str) -> None:
    """A request with three drafts between one without any, one that does not sample, and a prompt, whose line is the last."""
    sampled, kept = CASES[case]
    columns = ints(4, 0, 6, 3), ints(1, 5, 6, 6), ints(0, 1, 5, 5), ints(0, 3, -1, 0)
    entries, lines = ints(3, 5, 7, 8, 9, 2), ints(2, *sampled, 6)
    tokens, known = rows_of_text(0)
    draws = torch.zeros(NUM_ROWS, 2, dtype=torch.int32, device=DEVICE), known
    found, grown = [], []
    for module in (kernel, reference):
        counts, rows_known = ints(7, 7, 7, 7), known.clone()
        if module is kernel:
            module.accept(columns, rows_known, ints(0, 0, 0, 0), entries, lines, counts, tokens, draws, 4)
        else:
            module.accept(columns, rows_known, entries, lines, counts, 4)
        found.append(counts.tolist())
        grown.append((rows_known - known).tolist())
    assert found[0] == found[1] == [1, kept, 0, 1]
    assert grown[0] == grown[1] == [kept, 0, 0, 1, 1, 0, 0, 0, 0]


def test_accept_by_chance() -> None:
    """As often as the rates say, by numbers that have nothing to do with the draws of tokens; drafts then stand in the row."""
    n, rates = 400, [0.9, 0.5, 0.25]
    seeds = np.random.default_rng(0).integers(0, 1 << 63, n).astype(np.uint64)
    halves = torch.from_numpy(seeds.view(np.int32).reshape(n, 2).copy()).to(DEVICE)
    tokens = torch.zeros(n, 64, dtype=torch.int32, device=DEVICE)
    known = torch.full((n,), 20, dtype=torch.int32, device=DEVICE)
    prompts = torch.full((n,), 7, dtype=torch.int32, device=DEVICE)
    each = torch.arange(n, dtype=torch.int32, device=DEVICE)
    columns = each, 4 * (each + 1), 4 * each, torch.full_like(each, 3)
    entries, sampled = (
        torch.full((4 * n,), 5, dtype=torch.int32, device=DEVICE),
        torch.full((4 * n,), 6).int().to(DEVICE),
    )
    own, counts = torch.full_like(each, 19), torch.empty_like(each)
    padded = torch.tensor([*rates, *[0.0] * (kernel.MOST - 3)], dtype=torch.float64, device=DEVICE)
    salt = np.uint64(0x5350454344524654)
    of_salt = torch.from_numpy(np.array([salt]).view(np.int32).copy()).to(DEVICE)
    kernel.accept(columns, known, own, entries, sampled, counts, tokens, (halves, prompts), n, (padded, of_salt))
    draws = [uniforms(seeds ^ salt, np.full(n, 20 + at - 7)) < rates[at] for at in range(3)]
    expected = np.minimum.reduce([np.where(draw, 3, at) for at, draw in enumerate(draws)])
    assert (counts.cpu().numpy() == expected + 1).all()
    assert (known.cpu().numpy() == 20 + expected + 1).all()
    lines = sampled.view(n, 4).cpu().numpy()
    stands = tokens[:, 20:24].cpu().numpy()
    for request, count in enumerate(expected):
        assert lines[request].tolist() == [5] * count + [6] * (4 - count)
        assert stands[request].tolist() == [5] * count + [0] * (4 - count)
