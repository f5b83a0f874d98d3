"""Steady streams as columns: all tests here hold with them, whatever the number of requests, and without.

Tests here share journal_bench.py.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshlm.detokenizer.core import Detokenizer

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module", params=[1, 10_000], ids=["columns", "loops"])
def fewest_steady(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of a module's scope, so that hypothesis may draw many examples under one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Detokenizer, "fewest_steady", request.param)
        yield
