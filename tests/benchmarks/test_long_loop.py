"""benchmarks/long_loop.py: what it asks of an engine, and that a variant changes its own constants alone (no GPU: nothing is timed)."""

from collections import Counter
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")
from meshlm.protocol.edges.step import StepPlan
from meshlm.scheduler_proc import budget

PROMPT, OUTPUT, STREAMS, REQUESTS = 5000, 8, 3, 7


class FakeEngine:
    """Takes a millisecond for a step and a microsecond for a token; holds plans against what a worker may be asked."""

    resolved = SimpleNamespace(max_num_batched_tokens=2048)
    facts = SimpleNamespace(block_size=16, vocab_size=100)

    def __init__(self) -> None:
        self.computed: dict[int, int] = {}
        self.sampled: Counter[int] = Counter()
        self.now_ns = self.new_rows = self.most_in_flight = self.in_flight = 0

    def step(self, plan: StepPlan, received_ns: int) -> SimpleNamespace:
        rows, starts, counts = (
            np.frombuffer(column, np.int32).tolist() for column in (plan.rows, plan.starts, plan.counts)
        )
        for new in plan.new_rows:
            assert self.computed.get(new.row, PROMPT + OUTPUT - 1) == PROMPT + OUTPUT - 1, "the row's stream goes on"
            self.computed[new.row] = 0
            self.new_rows += 1
        assert len(set(rows)) == len(rows)
        assert sum(counts) == plan.num_tokens <= self.resolved.max_num_batched_tokens
        for row, start, count, samples in zip(rows, starts, counts, plan.samples, strict=True):
            assert start == self.computed[row], "a token is left out or computed twice"
            self.computed[row] += count
            assert samples == (self.computed[row] >= PROMPT)
            self.sampled[row] += samples
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.now_ns += 1_000_000 + 1000 * plan.num_tokens
        done = SimpleNamespace(gpu_ns=1_000_000 + 1000 * plan.num_tokens, launched_ns=0, done_ns=self.now_ns)
        return SimpleNamespace(wait=lambda: self._done(done))

    def _done(self, result: SimpleNamespace) -> SimpleNamespace:
        self.in_flight -= 1
        return result


@pytest.fixture
def long_loop(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("long_loop")


def test_each_token_of_each_stream_is_computed_once(long_loop: ModuleType) -> None:
    engine = FakeEngine()
    found = long_loop.Loop(engine, STREAMS, REQUESTS, PROMPT, OUTPUT).run()
    assert engine.new_rows == REQUESTS
    assert sum(engine.sampled.values()) == REQUESTS * OUTPUT
    assert engine.most_in_flight == 2
    assert found["num_steps"] > REQUESTS * PROMPT / 2048


def test_a_variant_changes_no_other(long_loop: ModuleType) -> None:
    defaults = {name: value for name, value in vars(budget).items() if name.isupper()}
    try:
        long_loop.set_constants("EVEN_TOKENS=64 BEARABLE_S=0.5", defaults)
        assert (budget.EVEN_TOKENS, budget.BEARABLE_S) == (64, 0.5)
        long_loop.set_constants("KEEP_UP=2", defaults)
        assert defaults["EVEN_TOKENS"] == budget.EVEN_TOKENS
        assert budget.KEEP_UP == 2.0
        assert long_loop.set_constants("wave=528 KEEP_UP=2", defaults) == {"wave": 528}
        with pytest.raises(SystemExit, match="NO_SUCH"):
            long_loop.set_constants("NO_SUCH=1", defaults)
    finally:
        long_loop.set_constants("", defaults)
    assert {name: getattr(budget, name) for name in defaults} == defaults
