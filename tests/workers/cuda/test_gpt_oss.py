"""gpt-oss on a GPU, its experts MXFP4, in CUDA graphs: sinks, windows, biases, the clamped activation; against transformers."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import engine
from mxfp4_files import mxfp4_model
from near_transformers import errors, history

from meshlm.kernels.packed_experts.layout import ExpertWeight

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_error_is_no_worse_than_transformers_bfloat16(mode: str, tmp_path: Path) -> None:
    """The codes are the files', one row, few and many go their ways, and with FULL all steps of decodes are graphs."""
    theirs = mxfp4_model(tmp_path)
    made = engine(tmp_path, load_format="auto", cudagraph_mode=mode)
    for mixture in made.model.mixtures():
        assert all(isinstance(linear.grouped().kernel, ExpertWeight) for linear in mixture.experts.linears())
        assert mixture.fused.experts.name == "packed"
    assert bool(made.graphs.keys) is (mode == "FULL")
    ours, error = errors(theirs, history(made))
    assert ours <= 1.2 * error, f"mean error {ours:.4f}, transformers' own {error:.4f}"
