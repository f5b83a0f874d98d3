"""How long the device computed, and how long it stood still although requests were running."""

import pytest
from bench import Bench, limits
from msgspec.structs import replace

from meshlm.protocol.edges.step import StepResult

MS = 1_000_000


@pytest.fixture
def bench() -> Bench:
    return Bench(limits(), num_blocks=32, block_size=4)


def run(bench: Bench, **times: int) -> tuple[int, int]:
    """One step that says these times of itself; what that adds to the counts."""
    news, model = bench.core.load, bench.model.run
    before = news.busy_ns, news.idle_ns

    def timed(plan: object) -> StepResult:
        return replace(model(plan), **times)  # type: ignore[arg-type]

    bench.model.run = timed  # type: ignore[method-assign]
    bench.step()
    bench.model.run = model  # type: ignore[method-assign]
    return news.busy_ns - before[0], news.idle_ns - before[1]


def test_a_gap_before_a_prompt_is_nobody_s_waiting(bench: Bench) -> None:
    bench.assign(1, [5, 6, 7], 8)
    assert run(bench, gpu_ns=3 * MS, gap_ns=1000 * MS) == (3 * MS, 0)
    assert run(bench, gpu_ns=2 * MS, gap_ns=MS) == (2 * MS, MS), "who decodes could have gone on at once"


def test_a_prompt_of_one_token_is_no_decode_that_waited(bench: Bench) -> None:
    bench.assign(1, [5], 2)
    assert run(bench, gpu_ns=3 * MS, gap_ns=1000 * MS) == (3 * MS, 0)
    assert run(bench, gpu_ns=2 * MS, gap_ns=MS) == (2 * MS, MS)
    bench.assign(2, [6], 1)
    assert run(bench, gpu_ns=3 * MS, gap_ns=1000 * MS) == (3 * MS, 0)


def test_a_device_without_a_clock_of_its_own(bench: Bench) -> None:
    """From launch to end, and from the end of the step before to the launch; the step before may end later than the launch."""
    bench.assign(1, [5, 6, 7], 8)
    assert run(bench, launched_ns=10 * MS, done_ns=15 * MS) == (5 * MS, 0)
    assert run(bench, launched_ns=17 * MS, done_ns=20 * MS) == (3 * MS, 2 * MS)
    assert run(bench, launched_ns=18 * MS, done_ns=24 * MS) == (4 * MS, 0)


def test_the_budget_is_told_what_prompts_attend_to(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's tokens and those before them, and of the next chunk's first token how many are before it."""
    learned: list[tuple[float, ...]] = []
    asked: list[tuple[int, ...]] = []
    budget = bench.core.batching.budget

    def limit(*step: int) -> int:
        asked.append(step)
        return 6

    monkeypatch.setattr(budget, "learn", lambda *step: learned.append(step))
    monkeypatch.setattr(budget, "prefill_limit", limit)
    bench.assign(1, list(range(14)), 1)
    for _ in range(3):
        bench.step()
    assert [step[3] for step in learned] == [6 * 3, 6 * (6 + 3), 2 * (12 + 1)]
    assert [context for _, _, context in asked] == [0, 6, 12]
