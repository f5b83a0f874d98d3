"""Whisper on a GPU: the encoder by plain torch, cross-attention by Triton, in CUDA graphs; against transformers."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import small_whisper
from engine_driver import engine, prompts_of
from near_transformers import LENGTHS, errors, history

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_error_is_no_worse_than_transformers_bfloat16(mode: str, tmp_path: Path) -> None:
    theirs = small_whisper.WithAudio(small_whisper.made(tmp_path, small_whisper.LARGER), prompts_of(LENGTHS))
    made = engine(tmp_path, load_format="auto", cudagraph_mode=mode, max_model_len=448)
    assert made.compute.attention.name == "triton"
    assert bool(made.graphs.keys) is (mode == "FULL")
    ours, error = errors(theirs, history(made, [small_whisper.audio(nth) for nth in range(2)]))
    assert ours <= 1.2 * error, f"mean error {ours:.4f}, transformers' own {error:.4f}"
