"""Several groups of layers on a GPU: a block table each, in graphs and outside, and nothing read of what windows no longer see."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import Driver, engine, prompts_of
from near_transformers import transformers_model

from meshlm.protocol.kv import FullAttention, SlidingWindow
from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.engine.engine import ModelEngine

pytestmark = pytest.mark.gpu


def logits(made: ModelEngine, *, spoils: bool) -> torch.Tensor:
    """A prompt in two chunks beside another one's decodes, then decodes of both."""
    driver = Driver(made, prompts_of([333, 140]), SamplingParams(max_tokens=16, temperature=0.0))
    driver.spoils = spoils
    driver.step({1: 140})
    driver.step({0: 200, 1: 1})
    driver.step({0: 133, 1: 1})
    for _ in range(6):
        driver.step({0: 1, 1: 1})
    return torch.stack([seen.logits for seen in driver.seen])


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "NONE"])
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_what_windows_no_longer_see_is_not_read(name: str, mode: str, tmp_path: Path) -> None:
    transformers_model(name, tmp_path)
    made = engine(tmp_path, load_format="auto", cudagraph_mode=mode)
    assert {*made.facts.kv_specs} == {FullAttention(), SlidingWindow(100)}
    assert len(made.compute.caches) > made.layout.num_tensors, "layers of several groups share a tensor"
    clean = logits(made, spoils=False)
    made.reset()
    spoiled = logits(made, spoils=True)
    assert spoiled.isfinite().all()
    torch.testing.assert_close(spoiled, clean, atol=1e-3, rtol=1e-3)
