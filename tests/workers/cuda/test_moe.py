"""Mixtures of experts on a GPU: one row, few and many, sorted and not, inside graphs and outside, against transformers."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import engine
from near_transformers import MIXTURES, errors, history, transformers_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("name", MIXTURES)
def test_error_is_no_worse_than_transformers_bfloat16(name: str, mode: str, tmp_path: Path) -> None:
    """Prompts in chunks and behind a cached prefix, decodes, a preempted request: against float32."""
    theirs = transformers_model(name, tmp_path)
    ours, error = errors(theirs, history(engine(tmp_path, load_format="auto", cudagraph_mode=mode)))
    assert ours <= 1.2 * error, f"mean error {ours:.4f}, transformers' own {error:.4f}"
