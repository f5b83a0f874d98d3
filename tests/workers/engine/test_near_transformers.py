"""A whole engine by plain torch is as near to float32 as transformers is. On a GPU: cuda/test_plain_torch.py, cuda/test_gemma.py."""

from pathlib import Path

import pytest
from near_transformers import GEMMA, check_plain_torch

from meshlm.workers.layers import cpu_ops


@pytest.mark.parametrize("name", GEMMA)
def test_gemma(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "available", lambda: False)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.1}
    check_plain_torch(name, tmp_path, "cpu", **sizes)
