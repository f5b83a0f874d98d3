"""Gemma 2, 3 and 4 on a GPU: heads of 256 and 512, soft caps, windows and two rotations in Triton kernels, in graphs and outside."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import engine
from near_transformers import GEMMA, GEMMA4, errors, history, transformers_model

from meshlm.workers.attention.triton_backend import TritonBackend

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("name", GEMMA)
def test_error_is_no_worse_than_transformers_bfloat16(name: str, mode: str, tmp_path: Path) -> None:
    """Prompts in chunks and behind a cached prefix, decodes, a preempted request: against float32."""
    theirs = transformers_model(name, tmp_path)
    ours, error = errors(theirs, history(engine(tmp_path, load_format="auto", cudagraph_mode=mode)))
    assert ours <= 1.1 * error, f"mean error {ours:.4f}, transformers' own {error:.4f}"


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("name", GEMMA4)
def test_unequal_heads_are_no_worse(name: str, mode: str, tmp_path: Path) -> None:
    """Two sizes of heads in one memory."""
    theirs = transformers_model(name, tmp_path)
    made = engine(tmp_path, load_format="auto", cudagraph_mode=mode)
    assert isinstance(made.compute.attention, TritonBackend)
    assert max(made.layout.shares) == 2
    ours, error = errors(theirs, history(made))
    assert ours <= 1.2 * error, f"mean error {ours:.4f}, transformers' own {error:.4f}"
