"""benchmarks/engine_step.py: the tables of models with several groups of layers, stepped on a CPU."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from meshlm.protocol.kv import FullAttention, RecurrentState, SlidingWindow


@pytest.fixture
def engine_step(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("engine_step")


def test_each_group_has_a_column(engine_step: ModuleType) -> None:
    specs = (FullAttention(), RecurrentState(), SlidingWindow(8))
    assert engine_step.block_table(1, 2, specs).tolist() == [6, 7, 8, 9, 7, 11], "a state's page is carried on"
    assert engine_step.block_table(2, 3, ()).tolist() == [6, 7, 8]
    plan = engine_step.prompts(3, 5, 4, 6, specs)
    tables = [np.frombuffer(new.block_ids, np.int32) for new in plan.new_rows]
    assert [len(table) for table in tables] == [9, 9, 9]
    assert len(set(np.concatenate(tables).tolist())) == 3 * (3 + 1 + 3), "rows share none"
