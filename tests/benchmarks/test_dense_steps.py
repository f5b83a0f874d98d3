"""benchmarks/dense_steps.py: which weights a step reads."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen2.5-7b", 7.62 - 152064 * 3584e-9), ("gemma3-4b", 3.88), ("llama3-3b", 3.21)]
)
def test_an_embedding_that_is_no_head_is_not_read(
    name: str, billions: float, benchmark_module: Callable[[str], ModuleType]
) -> None:
    config = benchmark_module("shapes").config_of(name)
    read = benchmark_module("dense_steps").bytes_read(config, Path(name))
    assert read / 2e9 == pytest.approx(billions, rel=0.01)
