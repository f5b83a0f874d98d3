"""Tests here import files.py by name; the pod of a mesh on one host."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from files import kubernetes


@pytest.fixture
def pod() -> Any:
    return kubernetes("deployment")["spec"]["template"]["spec"]


@pytest.fixture
def container(pod: Any) -> Any:
    (container,) = pod["containers"]
    return container
