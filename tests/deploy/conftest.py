"""The pod of a mesh on one host."""

from typing import Any

import pytest
from files import kubernetes


@pytest.fixture
def pod() -> Any:
    return kubernetes("deployment")["spec"]["template"]["spec"]


@pytest.fixture
def container(pod: Any) -> Any:
    (container,) = pod["containers"]
    return container
