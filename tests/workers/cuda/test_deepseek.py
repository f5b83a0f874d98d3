"""DeepSeek-V2 and V3 on a GPU: latents in the Triton kernels, projected up and absorbed, inside graphs and outside."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import engine
from near_transformers import DEEPSEEK, errors_of_rows, history, transformers_model

from meshlm.workers.attention import triton_latent

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("dense_from", [1, 1 << 20])
@pytest.mark.parametrize("name", DEEPSEEK)
def test_error_is_no_worse_than_transformers_bfloat16(
    name: str, dense_from: int, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks and behind a cached prefix, decodes, a preempted request: against float32.

    The median of rows: where two experts are all but equal, a rounding chooses between them, and one row is far from float32.
    """
    monkeypatch.setattr(triton_latent, "DENSE_FROM", dense_from)
    theirs = transformers_model(name, tmp_path)
    ours, error = errors_of_rows(theirs, history(engine(tmp_path, load_format="auto", cudagraph_mode=mode)))
    assert ours.median() <= 1.2 * error.median(), f"ours {ours.tolist()}, transformers' own {error.tolist()}"
