"""A whole engine by plain torch is as near to float32 as transformers is. On a GPU: cuda/test_plain_torch.py, cuda/test_gemma.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import engine
from near_transformers import DEEPSEEK, GEMMA, check_plain_torch, expected, history, transformers_model

from meshlm.protocol.kv import Latent
from meshlm.workers.layers import cpu_ops


@pytest.mark.parametrize("name", GEMMA)
def test_gemma(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "available", lambda: False)
    layers = {"num_hidden_layers": 2} if name == "gemma2" else {}
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "initializer_range": 0.1}
    check_plain_torch(name, tmp_path, "cpu", **sizes, **layers)


DEEPSEEK_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "initializer_range": 0.1,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "moe_intermediate_size": 64,
}
"""A dense layer and one of experts: a CPU takes its time for products in bfloat16."""


@pytest.mark.parametrize("name", DEEPSEEK)
def test_deepseek(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ops, "available", lambda: False)
    check_plain_torch(name, tmp_path, "cpu", **DEEPSEEK_SIZES)


@pytest.mark.parametrize("name", DEEPSEEK)
def test_deepseek_by_the_compiled_kernels(name: str, tmp_path: Path) -> None:
    """Latents in the cache: chunks, a cached prefix, a preempted request, and the same greedy tokens."""
    theirs = transformers_model(name, tmp_path, **DEEPSEEK_SIZES)
    settings: dict[str, Any] = {
        "device": "cpu",
        "attention_backend": "cpu",
        "kv_cache_memory": 16 << 20,
        "dtype": "float32",
    }
    driver = history(engine(tmp_path, load_format="auto", **settings))
    assert driver.engine.facts.kv_specs == (Latent(128, 32),)
    found, wanted = torch.stack([seen.logits for seen in driver.seen]), expected(theirs, driver)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
