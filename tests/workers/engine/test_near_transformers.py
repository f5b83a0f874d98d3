"""A whole engine by plain torch, which is what an old GPU runs too: as near to float32 as transformers is. GPUs: cuda/test_gemma.py."""

from pathlib import Path

import pytest
import torch
from engine_driver import Driver, engine
from near_transformers import GEMMA, errors, expected, gemma, history

from meshlm.workers.layers import cpu_ops


def on_cpu(folder: Path, dtype: str) -> Driver:
    settings: dict[str, object] = {"device": "cpu", "attention_backend": "torch", "kv_cache_memory": 16 << 20}
    return history(engine(folder, load_format="auto", dtype=dtype, **settings))


@pytest.mark.parametrize("name", GEMMA)
def test_gemma(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bfloat16 engine makes the errors of bfloat16, and a float32 engine makes none."""
    monkeypatch.setattr(cpu_ops, "available", lambda: False)
    theirs = gemma(name, tmp_path, hidden_size=128, intermediate_size=256, head_dim=32, initializer_range=0.1)
    exact = on_cpu(tmp_path, "float32")
    found = torch.stack([seen.logits for seen in exact.seen])
    torch.testing.assert_close(found, expected(theirs, exact), atol=1e-4, rtol=1e-4)
    ours, error = errors(theirs, on_cpu(tmp_path, "bfloat16"))
    assert ours <= 1.1 * error, f"mean error {ours:.4f}, transformers' own {error:.4f}"
