"""Models whose queries see keys in a way of their own, on a GPU: chunks, ALiBi, chosen tokens; inside graphs and outside."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import engine
from near_transformers import CHOOSING, SEEN, SPARSE, errors_of_rows, history, transformers_model

from meshlm.workers.attention.triton_backend import TritonBackend

pytestmark = pytest.mark.gpu


def rows(name: str, mode: str, folder: Path) -> torch.Tensor:
    """Prompts in chunks and behind a cached prefix, decodes, a preempted request: distances from float32."""
    theirs = transformers_model(name, folder)
    made = engine(folder, load_format="auto", cudagraph_mode=mode)
    assert isinstance(made.compute.attention, TritonBackend)
    found = errors_of_rows(theirs, history(made))
    assert torch.isfinite(found).all()
    return found


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("name", [*SEEN, *SPARSE])
def test_error_is_no_worse_than_transformers_bfloat16(name: str, mode: str, tmp_path: Path) -> None:
    ours, theirs = rows(name, mode, tmp_path)
    assert ours.mean() <= 1.2 * theirs.mean(), f"ours {ours.tolist()}, transformers' own {theirs.tolist()}"


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("name", CHOOSING)
def test_most_logits_are_as_near_where_rounding_changes_a_choice(name: str, mode: str, tmp_path: Path) -> None:
    ours, theirs = rows(name, mode, tmp_path)
    assert ours.median() <= 1.5 * theirs.median(), f"ours {ours.tolist()}, transformers' own {theirs.tolist()}"
