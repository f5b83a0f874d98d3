"""Every name of the registry but Whisper's, with small random weights: text behind a scheduler, vectors and classes of an engine alone.

tests/mesh/test_families.py starts the processes for one name of each class that computes them.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from bench import Bench, limits
from engine_driver import Driver, engine
from family_models import folder_of
from served_engines import LENGTH, OUTPUT, PROMPTS, STEP, Engines, ask

from meshlm.architectures.family import Serves
from meshlm.architectures.registry import families
from meshlm.protocol.config import MeshConfig
from meshlm.protocol.config.resolved import Resolved
from meshlm.protocol.sampling import SamplingParams
from meshlm.supervisor.settings import flags, resolve

TEXT = [name for name, family in families().items() if family.serves is Serves.TEXT]
OTHERS = [name for name, family in families().items() if family.serves not in (Serves.TEXT, Serves.TRANSCRIPTIONS)]
NUM_PROMPTS = 3


def resolved_by_processes(folder: Path) -> Resolved:
    """As the supervisor writes it and its children read it."""
    config = resolve.resolve(flags.build({"model": str(folder), "device": "cpu", "load_format": "dummy"}, None))
    read = msgspec.json.decode(msgspec.json.encode(config), type=MeshConfig)
    assert read == config
    assert read.resolved is not None
    return read.resolved


@pytest.mark.parametrize("architecture", TEXT)
def test_it_continues_prompts(architecture: str, tmp_path: Path) -> None:
    folder = folder_of(architecture, tmp_path)
    assert resolved_by_processes(folder).pooling is None
    engines = Engines(folder, 120, "cpu", load_format="dummy")
    try:
        bench = Bench(limits(max_model_len=LENGTH, max_num_batched_tokens=STEP), 0, 0, model=engines)
        for handle, prompt in enumerate(PROMPTS[:NUM_PROMPTS]):
            ask(bench, handle, prompt)
        bench.finish()
    finally:
        engines.close()
    assert {handle: len(tokens) for handle, tokens in bench.tokens.items()} == dict.fromkeys(range(NUM_PROMPTS), OUTPUT)
    assert all(0 <= token < engines.engines[0].spec.vocab_size for tokens in bench.tokens.values() for token in tokens)


@pytest.mark.parametrize("architecture", OTHERS)
def test_it_gives_what_its_family_says(architecture: str, tmp_path: Path) -> None:
    folder = folder_of(architecture, tmp_path)
    pooling = resolved_by_processes(folder).pooling
    assert pooling is not None
    scores = "classify" in pooling.tasks[0]
    assert scores == (families()[architecture].serves is not Serves.VECTORS)
    settings: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 64,
        "kv_cache_memory": 16 << 20,
        "cpu_threads": 1,
    }
    made = engine(folder, **settings)
    driver = Driver(made, [[5, 9, 3]], SamplingParams(), {0: pooling.pool(pooling.tasks[0])})
    driver.step({0: 3})
    found = np.frombuffer(driver.pooled[0], np.float32)
    assert len(found) % pooling.size == 0
    assert np.isfinite(found).all()
    assert found.any()
