"""Every name of the registry that gives vectors or classes: an engine with small random weights pools a prompt."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import Driver, engine
from family_models import folder_of

from meshlm.architectures.family import Serves
from meshlm.architectures.registry import families
from meshlm.protocol.sampling import SamplingParams
from meshlm.supervisor.settings import flags, resolve

NAMES = [name for name, family in families().items() if family.serves not in (Serves.TEXT, Serves.TRANSCRIPTIONS)]


@pytest.mark.parametrize("architecture", NAMES)
def test_it_gives_what_its_family_says(architecture: str, tmp_path: Path) -> None:
    folder = folder_of(architecture, tmp_path)
    resolved = resolve.resolve(
        flags.build({"model": str(folder), "device": "cpu", "load_format": "dummy"}, None)
    ).resolved
    assert resolved is not None
    assert resolved.pooling is not None
    scores = "classify" in resolved.pooling.tasks[0]
    assert scores == (families()[architecture].serves is not Serves.VECTORS)
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 64,
        "kv_cache_memory": 16 << 20,
        "cpu_threads": 1,
    }
    made = engine(folder, **settings)
    driver = Driver(made, [[5, 9, 3]], SamplingParams(), {0: resolved.pooling.pool(resolved.pooling.tasks[0])})
    driver.step({0: 3})
    found = np.frombuffer(driver.pooled[0], np.float32)
    assert len(found) % resolved.pooling.size == 0
    assert np.isfinite(found).all()
    assert found.any()
