"""An engine that has slept computes what it did before. On the CPU the KV cache's pages go, and the weights stay."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_driver import MODEL, Driver, engine, prompts_of

from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.sleeping import KV_CACHE, TAGS
from meshlm.workers.engine.sleeper import Released

SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory": 1 << 24, "max_num_seqs": 2}
MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_pages_go_back_and_come_empty() -> None:
    held = torch.from_numpy(np.full(16 * MIB, 7, np.uint8))
    view = held.view(16, MIB)
    before = resident_bytes()
    released = Released([held, view], keep=False)
    assert resident_bytes() < before - 14 * MIB
    released.restore()
    assert held[MIB:-MIB].eq(0).all()
    view[3] = 5
    assert held[3 * MIB : 4 * MIB].eq(5).all()
    Released([held], keep=True).restore()
    assert held[3 * MIB : 4 * MIB].eq(5).all(), "what is in the host's memory stays there"


def test_the_same_tokens_after_it(tmp_path: Path) -> None:
    config = MODEL | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = engine(tmp_path, **SMALL)
    prompts = prompts_of([9, 5])

    def tokens() -> list[list[int]]:
        driver = Driver(made, prompts, SamplingParams(max_tokens=6, temperature=0.0))
        driver.step({0: 9, 1: 5})
        for _ in range(4):
            driver.step({0: 1, 1: 1})
        made.reset()
        return driver.tokens

    before = tokens()
    made.be_without(TAGS)
    made.be_without((KV_CACHE,))
    made.be_without(())
    assert tokens() == before
