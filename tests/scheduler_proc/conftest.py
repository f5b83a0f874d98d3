"""Tests here import bench.py by name."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshlm.scheduler_proc.batching import Batching

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module", params=[1, 10_000], ids=["columns", "loops"])
def fewest_steady(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything holds with columns, whatever the number of requests, and without. Of a module's scope, for hypothesis."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batching, "fewest_steady", request.param)
        yield
