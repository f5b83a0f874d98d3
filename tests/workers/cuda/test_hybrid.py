"""Models with recurrent states on a GPU: the Triton kernels, inside graphs and outside."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import Driver, engine, prompts_of
from near_transformers import HYBRIDS, errors, transformers_model

from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.attention import triton_backend
from meshlm.workers.engine.engine import ModelEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def history(made: ModelEngine) -> Driver:
    """A prompt in two chunks beside another one's decodes, decodes of both, and one that is computed anew."""
    driver = Driver(made, prompts_of([333, 40]), SamplingParams(max_tokens=16, temperature=0.0))
    driver.step({1: 40})
    driver.step({0: 200, 1: 1})
    driver.step({0: 133, 1: 1})
    for _ in range(4):
        driver.step({0: 1, 1: 1})
    driver.again(1, 0)
    driver.step({0: 1, 1: driver.length(1)})
    driver.step({0: 1, 1: 1})
    return driver


@pytest.mark.parametrize("mode", ["FULL", "NONE", "plain torch"])
@pytest.mark.parametrize("name", HYBRIDS)
def test_error_is_no_worse_than_transformers_bfloat16(
    name: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks and beside decodes, decodes, a preempted request: against float32. Graphs are for the kernels alone."""
    monkeypatch.setattr(triton_backend, "KINDS", () if mode == "plain torch" else ("mamba2",))
    graphs = "NONE" if mode == "plain torch" else mode
    theirs = transformers_model(name, tmp_path)
    ours, error = errors(theirs, history(engine(tmp_path, load_format="auto", cudagraph_mode=graphs)))
    assert ours <= 1.1 * error, f"mean error {ours:.4f}, transformers' own {error:.4f}"
