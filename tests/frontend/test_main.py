"""How a frontend's process begins."""

import sys

import pytest

from meshlm.frontend import main
from meshlm.runtime.process import process


def test_threads_hand_over_to_the_loop_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that make long answers; see SWITCH_S."""
    before, seen = sys.getswitchinterval(), list[float]()
    monkeypatch.setattr(process, "main", lambda *arguments: seen.append(sys.getswitchinterval()))
    try:
        main.main()
    finally:
        sys.setswitchinterval(before)
    assert seen[0] <= 0.001
