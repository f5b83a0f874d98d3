"""FP8 checkpoints on a GPU: codes stay in memory, and logits are as near to float32's as the definition is in bfloat16."""

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import Driver, engine
from near_transformers import errors, expected, history
from quantised_models import FP8, KINDS, LARGER, write

pytestmark = pytest.mark.gpu


def driven(folder: Path, **settings: Any) -> Driver:
    return history(engine(folder, load_format="auto", **settings))


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("name", KINDS)
def test_error_is_no_worse_than_the_definition_s_in_bfloat16(name: str, mode: str, tmp_path: Path) -> None:
    """Prompts in chunks and behind a cached prefix, decodes, a preempted request."""
    theirs, _ = write(tmp_path, KINDS[name], **LARGER)
    driver = driven(tmp_path, cudagraph_mode=mode)
    assert driver.engine.model.get_submodule("layers.1.attention.qkv").weight.dtype == (
        torch.bfloat16 if name == "compressed-weights" else FP8
    )
    ours, error = errors(theirs, driver)
    assert ours <= 1.2 * error, f"mean error {ours:.4f}, the definition's own {error:.4f}"


@pytest.mark.parametrize("name", KINDS)
def test_float32_gives_what_the_definition_gives(name: str, tmp_path: Path) -> None:
    """By plain torch. bfloat16 changes about as many codes as FP8 rounds values; float32 tells whether they are rounded at all."""
    theirs, _ = write(tmp_path, KINDS[name], **LARGER)
    driver = driven(tmp_path, dtype="float32")
    exact = expected(theirs, driver)
    found = torch.stack([seen.logits for seen in driver.seen])
    assert float((found - exact).abs().mean() / exact.std()) < 0.03


def test_with_an_fp8_cache(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    theirs, _ = write(tmp_path, KINDS["compressed-channel"], **LARGER)
    driver = driven(tmp_path, kv_cache_dtype="fp8")
    found = torch.stack([seen.logits for seen in driver.seen])
    assert float(torch.cosine_similarity(found, expected(theirs, driver), dim=1).min()) > 0.97
