"""Models whose queries see keys in a way of their own, on a GPU: attention in chunks, ALiBi, chosen tokens; in graphs and outside."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import engine
from near_transformers import SEEN, SPARSE, errors, history, transformers_model

from meshlm.workers.attention.triton_backend import TritonBackend

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("name", SEEN)
def test_error_is_no_worse_than_transformers_bfloat16(name: str, mode: str, tmp_path: Path) -> None:
    """Prompts in chunks and behind a cached prefix, decodes, a preempted request: against float32."""
    check(name, mode, tmp_path, 1.2)


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention_is_no_worse(name: str, mode: str, tmp_path: Path) -> None:
    """Rounding chooses other tokens for both."""
    check(name, mode, tmp_path, 1.5 if name == "few are chosen" else 1.2)


def check(name: str, mode: str, tmp_path: Path, most: float) -> None:
    theirs = transformers_model(name, tmp_path)
    made = engine(tmp_path, load_format="auto", cudagraph_mode=mode)
    assert isinstance(made.compute.attention, TritonBackend)
    ours, error = errors(theirs, history(made))
    assert ours <= most * error, f"mean error {ours:.4f}, transformers' own {error:.4f}"
