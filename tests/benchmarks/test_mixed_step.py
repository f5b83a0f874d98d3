"""benchmarks/mixed_step.py: which steps it asks of an engine, and how it reads a trace (no GPU: nothing is timed)."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("triton")
from meshlm.protocol.edges.step import StepPlan
from meshlm.protocol.kv import FullAttention, RecurrentState

BLOCK, CONTEXT = 16, 1088


def ints(column: bytes) -> list[int]:
    found: list[int] = np.frombuffer(column, np.int32).tolist()
    return found


@pytest.fixture
def mixed_step(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("mixed_step")


@pytest.mark.parametrize(("decodes", "tokens"), [(64, 3008), (256, 2816), (1, 1), (7, 1024)])
def test_contexts_are_computed_before_the_step(mixed_step: ModuleType, decodes: int, tokens: int) -> None:
    rows = mixed_step.rows_of(decodes, tokens, CONTEXT, BLOCK)
    known: dict[int, int] = {}
    blocks: set[int] = set()
    for plan in mixed_step.contexts(rows):
        assert plan.num_tokens <= mixed_step.MOST
        for new in plan.new_rows:
            mine = ints(new.block_ids)
            assert not blocks & set(mine)
            blocks |= set(mine)
            assert len(ints(new.token_ids)) == new.num_prompt_tokens
            assert len(mine) * BLOCK > new.num_prompt_tokens
        for row, start, count in zip(ints(plan.rows), ints(plan.starts), ints(plan.counts), strict=True):
            assert start == 0
            known[row] = count
    step: StepPlan = mixed_step.mixed(rows, decodes)
    assert not step.new_rows
    columns = list(zip(ints(step.rows), ints(step.starts), ints(step.counts), strict=True))
    assert columns[:decodes] == [(row, CONTEXT, 1) for row in range(decodes)]
    assert all(known[row] == CONTEXT for row in range(decodes))
    assert [(start, known[row]) for row, start, _ in columns[decodes:]] == [
        (0, count) for _, _, count in columns[decodes:]
    ]
    assert sum(count for _, _, count in columns[decodes:]) == tokens
    assert step.num_tokens == decodes + tokens


def test_a_trace_is_summed_by_kernel(mixed_step: ModuleType) -> None:
    names = [
        ("norm", 0.0, 2.0),
        ("product", 3.0, 10.0),
        ("norm", 12.0, 4.0),
        ("product", 16.5, 10.0),
    ]  # the third begins early
    found = mixed_step.by_name([{"name": name, "ts": ts, "dur": dur} for name, ts, dur in names])
    assert [(one["name"], one["us"], one["gap_before_us"]) for one in found] == [
        ("product", 10.0, 0.75),
        ("norm", 3.0, 0.0),
    ]
    assert found[0]["us_per_step"] == 20.0 / mixed_step.PROFILED


def test_models_with_several_groups_have_pages_of_each(mixed_step: ModuleType) -> None:
    specs = (FullAttention(), RecurrentState())
    rows = mixed_step.rows_of(2, 100, 40, BLOCK, specs)
    blocks = -(-(100 + mixed_step.RESERVE) // BLOCK)
    assert [len(ints(row.block_ids)) for row in rows] == [2 * blocks] * 3
