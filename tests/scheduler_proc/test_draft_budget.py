"""The choice of drafts on devices whose times and acceptances are known: within its bounds, and as good as the best fixed number."""

import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshlm.scheduler_proc.draft_budget import PROBE_AFTER, DraftBudget

DRAFTS, STEPS, IN_FLIGHT, NOISE = 5, 2000, 2, 0.05

# Seconds of a step with so many rows and tokens.
DEVICES: dict[str, Callable[[int, int], float]] = {
    "flat": lambda rows, tokens: 6e-3,
    "flat, then linear": lambda rows, tokens: max(6e-3, 2.5e-4 * tokens) + 1e-4 * rows,
    "linear": lambda rows, tokens: 2e-3 * tokens,
    "a fixed cost": lambda rows, tokens: 10e-3 + 1e-3 * tokens,
}

# The acceptance of a row's position when those before it were accepted. `late`: in the second half of the steps.
PATTERNS: dict[str, Callable[[bool, int, int], float]] = {
    "none": lambda late, row, position: 0.0,
    "few": lambda late, row, position: 0.3,
    "most": lambda late, row, position: 0.8,
    "all": lambda late, row, position: 1.0,
    "fewer with each position": lambda late, row, position: 0.8 * 0.7**position,
    "of every other row": lambda late, row, position: 0.9 if row % 2 else 0.05,
    "until the middle": lambda late, row, position: 0.0 if late else 0.9,
    "from the middle on": lambda late, row, position: 0.9 if late else 0.0,
    "other rows from the middle on": lambda late, row, position: 0.9 if row % 2 == late else 0.05,
}


class Device:
    """Takes what the budget chooses; `expected` tokens and seconds sum up, of the choices and of each fixed number."""

    def __init__(
        self, num_rows: int, seconds: Callable[[int, int], float], accepts: Callable[[bool, int, int], float]
    ) -> None:
        self.num_rows, self._seconds, self._dice = num_rows, seconds, random.Random(5)
        self.budget = DraftBudget(num_rows, DRAFTS)
        self._rates = [
            np.array([[accepts(late, row, position) for position in range(DRAFTS)] for row in range(num_rows)])
            for late in (False, True)
        ]
        self.chosen: list[list[int]] = []
        self.tokens = self.seconds = 0.0
        self.fixed = np.zeros((DRAFTS + 1, 2))
        self._inflight: deque[tuple[list[int], list[int], float]] = deque()

    def run(self, num_steps: int, late: bool) -> None:
        rates, rows = self._rates[late], self.num_rows
        gains = np.hstack([np.zeros((rows, 1)), rates.cumprod(axis=1).cumsum(axis=1)])  # of each number of drafts
        for number in range(DRAFTS + 1):
            one = rows + gains[:, number].sum(), self._seconds(rows, rows * (1 + number))
            self.fixed[number] += num_steps * np.array(one)
        for _ in range(num_steps):
            counts = self.budget.choose(range(rows), [DRAFTS] * rows, 10_000)
            self.chosen.append(counts)
            duration_s = self._seconds(rows, rows + sum(counts))
            self.tokens += rows + float(gains[range(rows), counts].sum())
            self.seconds += duration_s
            accepted = [self._accept(row_rates, count) for row_rates, count in zip(rates.tolist(), counts, strict=True)]
            self._inflight.append((counts, accepted, duration_s * self._dice.gauss(1.0, NOISE)))
            if len(self._inflight) == IN_FLIGHT:
                self._result(*self._inflight.popleft())

    def _accept(self, rates: list[float], count: int) -> int:
        return next((position for position in range(count) if self._dice.random() >= rates[position]), count)

    def _result(self, counts: list[int], accepted: list[int], duration_s: float) -> None:
        self.budget.times.learn(self.num_rows, sum(counts), duration_s)
        drafting = [row for row, count in enumerate(counts) if count]
        if drafting:
            self.budget.acceptance.observe(
                drafting, [counts[row] for row in drafting], [accepted[row] for row in drafting]
            )

    def against_fixed(self, number: int | None = None) -> float:
        """The tokens a second over those of a fixed number of drafts, or of the best."""
        rates = self.fixed[:, 0] / self.fixed[:, 1]
        return float(self.tokens / self.seconds / (rates.max() if number is None else rates[number]))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_rows", [1, 12])
def test_it_is_as_good_as_the_best_fixed_number(device: str, pattern: str, num_rows: int) -> None:
    one = Device(num_rows, DEVICES[device], PATTERNS[pattern])
    one.run(STEPS // 2, late=False)
    one.run(STEPS // 2, late=True)
    assert one.against_fixed() >= 0.98
    assert one.against_fixed(0) >= 0.98


@pytest.mark.parametrize(
    ("device", "num_rows"),
    [
        ("linear", 1),
        ("linear", 64),
        ("a fixed cost", 1),
        ("a fixed cost", 12),
        ("flat, then linear", 12),
        ("flat, then linear", 64),
    ],
)
def test_without_acceptance_drafts_end_but_for_probes(device: str, num_rows: int) -> None:
    one = Device(num_rows, DEVICES[device], PATTERNS["none"])
    one.run(100, late=False)
    one.chosen.clear()
    before = one.seconds
    one.run(1000, late=False)
    none = 1000 * DEVICES[device](num_rows, num_rows)
    assert one.seconds - before <= 1.02 * none
    assert all(max(counts) <= 1 for counts in one.chosen)
    rows = np.array(one.chosen).sum(axis=0)
    assert rows.min() >= 1, "no row is given up"
    assert rows.max() <= 1 + 1000 / PROBE_AFTER


def test_all_are_drafted_where_all_are_accepted_and_cost_nothing() -> None:
    one = Device(12, DEVICES["flat"], PATTERNS["all"])
    one.run(1000, late=False)
    assert sum(counts == [DRAFTS] * 12 for counts in one.chosen) > 950


def test_rows_whose_drafts_are_accepted_get_them() -> None:
    one = Device(12, DEVICES["a fixed cost"], PATTERNS["of every other row"])
    one.run(1000, late=False)
    bad, good = np.array(one.chosen[100:]).mean(axis=0).reshape(6, 2).T
    assert bad.max() < 0.1
    assert good.min() > 1.5


def test_full_numbers_while_nothing_is_known() -> None:
    assert DraftBudget(4, 3).choose([0, 3], [3, 2], 100) == [3, 2]
    assert sum(DraftBudget(4, 3).choose([0, 3], [3, 2], 4)) == 4


def test_a_step_with_prompts_has_drafts_that_are_worth_a_prompt_s_tokens() -> None:
    one = Device(12, DEVICES["flat"], PATTERNS["most"])
    one.run(200, late=False)
    rows, most = range(12), [DRAFTS] * 12
    assert sum(one.budget.choose(rows, most, 1000, token_s=1e-6)) == 60
    assert 0 < sum(one.budget.choose(rows, most, 1000, token_s=2e-4)) < 60
    assert sum(one.budget.choose(rows, most, 1000, token_s=1e-2)) == 0
    few = one.budget.choose([0, 1], [DRAFTS] * 2, 1000, token_s=1e-2)
    assert sum(few) == 0, "steps with so few rows are not known, but those with other numbers are"


@given(st.data())
def test_never_above_a_row_s_most_nor_what_is_left(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 8))
    budget, rows = DraftBudget(8, 4), data.draw(st.permutations(range(8)))[:num_rows]
    for _ in range(data.draw(st.integers(1, 20))):
        most = data.draw(st.lists(st.integers(0, 4), min_size=num_rows, max_size=num_rows))
        left = data.draw(st.integers(0, 20))
        counts = budget.choose(rows, most, left, data.draw(st.sampled_from([0.0, 1e-4])))
        assert all(0 <= count <= bound for count, bound in zip(counts, most, strict=True))
        assert len(counts) == num_rows
        assert sum(counts) <= left
        budget.times.learn(num_rows, sum(counts), data.draw(st.floats(1e-5, 1.0)))
        drafting = [(row, count) for row, count in zip(rows, counts, strict=True) if count]
        if drafting:
            budget.acceptance.observe(
                *zip(*((row, count, data.draw(st.integers(0, count))) for row, count in drafting), strict=True)
            )
        if data.draw(st.booleans()):
            budget.begin(rows[0])
