"""The CPU engine with mixtures of experts: whatever the steps, the tokens are transformers' in float32."""

from pathlib import Path

import pytest
import torch
from engine_driver import engine
from near_transformers import MIXTURES, expected, history, transformers_model


@pytest.mark.parametrize("name", MIXTURES)
def test_greedy_tokens_are_transformers(name: str, tmp_path: Path) -> None:
    """Cold and behind a cached prefix, in chunks beside decodes, preempted and computed anew."""
    theirs = transformers_model(name, tmp_path, hidden_size=128, intermediate_size=64, head_dim=32)
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "load_format": "auto",
        "kv_cache_memory": 1 << 26,
        "cpu_threads": 1,
    }
    threads = torch.get_num_threads()
    driver = history(engine(tmp_path, **settings))  # type: ignore[arg-type]
    torch.set_num_threads(threads)
    exact = expected(theirs, driver)
    ours = torch.stack([seen.logits for seen in driver.seen])
    torch.testing.assert_close(ours, exact, atol=1e-4, rtol=1e-3)
    assert torch.equal(ours.argmax(dim=1), exact.argmax(dim=1))
    assert len(driver.seen) > 15
