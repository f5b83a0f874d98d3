"""Penalties against their reference, and against the general sampler."""

import numpy as np
import pytest
import torch
from device import DEVICE, DTYPES, MARKS, near
from torch import Tensor

from meshlm.kernels.penalties import kernel, reference
from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.output.sampler import SampleRows, _penalise
from meshlm.workers.rows.columns import RowColumns

pytestmark = MARKS
OFF = (1.0, 0.0, 0.0)
SETTINGS = [OFF, (1.3, 0.0, 0.0), (1.0, 0.5, 0.0), OFF, (1.0, 0.0, 0.25), (0.8, -0.5, 1.5), (1.1, 0.1, -0.2)]
BLOCK, EDITS = 64, 4


class Case:
    """One request a row, `num` of them; their places in the batch are in reverse order of their rows."""

    def __init__(self, num: int, vocab: int, longest: int, settings: list[tuple[float, float, float]]) -> None:
        dice = np.random.default_rng(num)
        self.num, self.vocab = num, vocab
        self.settings = [settings[i % len(settings)] for i in range(num)]
        self.lens = dice.integers(1, longest + 1, num)
        self.prompt_lens = np.maximum(1, (self.lens * dice.random(num)).astype(int))
        self.tokens = dice.integers(0, vocab // 2, (num + 1, longest + 3)).astype(np.int32)  # half of them never
        self.tokens[:, ::3] = 5  # and one of them again and again
        self.edits: list[list[tuple[int, float, int]]] = [[] for _ in range(num)]

    def device(self, values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(np.array(values), dtype=dtype, device=DEVICE)

    def run(self, logits: Tensor, lines: list[int] | None, counts: Tensor) -> Tensor:
        """Lines of the logits belong to these places; None: to all, in order."""
        order = list(range(self.num))[::-1]  # row of each place
        step = [min(int(self.lens[row]), 3) for row in order]  # tokens of this step: the others are computed already
        columns = (
            self.device(order),
            self.device([self.lens[row] - n for row, n in zip(order, step, strict=True)]),
            self.device(np.cumsum(step)),
        )
        state = kernel.Penalties(
            *(self.device([s[i] for s in self.settings] + [OFF[i]], torch.float32) for i in range(3))
        )
        num, ids = np.zeros(self.num + 1), np.zeros((self.num + 1, EDITS))
        adds, untils = np.full((self.num + 1, EDITS), 9.0), np.full((self.num + 1, EDITS), 99)
        for row, changes in enumerate(self.edits):
            num[row] = len(changes)
            for at, change in enumerate(changes):
                ids[row, at], adds[row, at], untils[row, at] = change
        edits = kernel.Edits(
            self.device(num.astype(int)),
            self.device(ids.astype(int)),
            self.device(adds, torch.float32),
            self.device(untils),
        )
        out = logits.clone()
        places = None if lines is None else self.device(lines)
        prompts = self.device([*self.prompt_lens, 1])
        kernel.penalise(out, columns, places, state, edits, prompts, self.device(self.tokens), counts, block=BLOCK)
        return out

    def expected(self, logits: Tensor, lines: list[int]) -> Tensor:
        rows = [self.num - 1 - line for line in lines]
        texts = [self.tokens[row, : self.lens[row]].tolist() for row in rows]
        prompts = [int(self.prompt_lens[row]) for row in rows]
        repetition, presence, frequency = ([self.settings[row][i] for row in rows] for i in range(3))
        return reference.penalise(
            logits,
            [text[:n] for text, n in zip(texts, prompts, strict=True)],
            [text[n:] for text, n in zip(texts, prompts, strict=True)],
            repetition,
            presence,
            frequency,
            [self.edits[row] for row in rows],
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num", "vocab", "longest"), [(1, 50, 7), (7, 301, 200), (70, 64, 90)])
def test_every_line_as_the_reference(num: int, vocab: int, longest: int, dtype: torch.dtype) -> None:
    """More lines than programs, ids that come once and often; counts are zero afterwards, so the next step is right too."""
    torch.manual_seed(0)
    case = Case(num, vocab, longest, SETTINGS if num > 1 else SETTINGS[5:])
    logits = (torch.randn(num, vocab, device=DEVICE) * 3).to(dtype)
    counts = kernel.workspace(num, vocab, DEVICE)
    assert len(counts) == min(num, kernel.PROGRAMS)
    for _ in range(2):
        near(case.run(logits, None, counts), case.expected(logits, list(range(num))), dtype)
        assert not counts.any()
    some = list(range(num))[::2]
    near(case.run(logits[::2], some, counts), case.expected(logits[::2], some), dtype)


def test_lines_without_penalties_are_not_touched() -> None:
    case = Case(5, 40, 30, [OFF])
    logits = torch.full((5, 40), float("nan"), device=DEVICE)
    assert bool(case.run(logits, None, kernel.workspace(5, 40, DEVICE)).isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_edits_come_before_penalties(dtype: torch.dtype) -> None:
    """Bias on every other row, with and without penalties; min_tokens as minus infinity, until it is reached."""
    case = Case(40, 64, 90, SETTINGS)
    said = case.lens - case.prompt_lens
    for row in range(0, 40, 2):
        case.edits[row] = [(7, 2.5, 1 << 30), (5, -1.25, 1 << 30)][: 1 + row % 4 // 2]
        case.edits[row].append((9, -torch.inf, int(said[row]) + row % 3))
    torch.manual_seed(0)
    logits = (torch.randn(40, 64, device=DEVICE) * 3).to(dtype)
    got = case.run(logits, None, kernel.workspace(40, 64, DEVICE))
    near(got, case.expected(logits, list(range(40))), dtype)
    assert 0 < int(got.isinf().sum()) < 20


def test_excluded_tokens_stay_excluded() -> None:
    case = Case(3, 40, 30, [(1.5, 0.5, 0.5), (0.5, 0.1, 0.0)])
    logits = torch.full((3, 40), -torch.inf, device=DEVICE)
    assert torch.equal(case.run(logits, None, kernel.workspace(3, 40, DEVICE)), logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_the_general_sampler(dtype: torch.dtype) -> None:
    case = Case(7, 301, 100, SETTINGS)
    table = RowColumns(7)
    for row, (repetition, presence, frequency) in enumerate(case.settings):
        table.set(
            row,
            SamplingParams(
                repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, temperature=0.0
            ),
        )
    torch.manual_seed(1)
    logits = (torch.randn(7, 301, device=DEVICE) * 3).to(dtype)
    ours = case.run(logits, None, kernel.workspace(7, 301, DEVICE))
    rows = np.arange(7, dtype=np.int32)[::-1].copy()
    at = SampleRows(rows, (case.lens - case.prompt_lens)[rows], case.lens[rows], case.prompt_lens[rows])
    theirs = logits.clone()
    _penalise(theirs, np.flatnonzero(table["penalised"][rows]), at, table, case.device(case.tokens))
    near(ours, theirs, dtype)
