"""Vectors of prompts on a GPU, by kernels and by plain torch, against transformers' hidden states."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import Driver, engine, in_bfloat16, prompts_of
from near_transformers import qwen3, vector

from meshlm.protocol.pool import Pool, PoolKind
from meshlm.protocol.sampling import SamplingParams

pytestmark = pytest.mark.gpu

LENGTHS = [333, 200, 90, 1, 50]
KINDS = dict(enumerate([PoolKind.MEAN, PoolKind.LAST, PoolKind.CLS, PoolKind.MEAN]))


def driven(folder: Path, **settings: Any) -> Driver:
    """Chunks beside a text, and a prompt that begins anew in the middle."""
    made = engine(folder, load_format="auto", **settings)
    tasks = {row: Pool(kind) for row, kind in KINDS.items()}
    driver = Driver(made, prompts_of(LENGTHS), SamplingParams(temperature=0.0), tasks)
    driver.step({3: 1, 0: 100, 4: 50})
    driver.strict = True
    driver.step({4: 1, 0: 100, 1: 150, 2: 50})
    driver.again(0, 0)
    driver.step({4: 1, 0: 300, 1: 50, 2: 40})
    driver.step({4: 1, 0: 33})
    assert sorted(driver.pooled) == sorted(KINDS)
    return driver


def test_float32(tmp_path: Path) -> None:
    theirs, driver = qwen3(tmp_path), driven(tmp_path, attention_backend="torch", dtype="float32")
    for row, kind in KINDS.items():
        found = np.frombuffer(driver.pooled[row], np.float32)
        np.testing.assert_allclose(found, vector(theirs, driver.prompts[row], kind), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_bfloat16(mode: str, tmp_path: Path) -> None:
    theirs, driver = qwen3(tmp_path), driven(tmp_path, cudagraph_mode=mode)
    exact = [vector(theirs, driver.prompts[row], kind) for row, kind in KINDS.items()]
    rounded = [vector(in_bfloat16(theirs), driver.prompts[row], kind) for row, kind in KINDS.items()]
    for row in KINDS:
        found = np.frombuffer(driver.pooled[row], np.float32)
        ours, error = (np.abs(each - exact[row]).mean() for each in (found, rounded[row]))
        assert ours <= 1.3 * error, f"{KINDS[row]}: mean error {ours:.5f}, transformers' own {error:.5f}"
