"""`--attention-backend torch` on a GPU, which is what GPUs without Triton run: no kernels of ours and no graphs."""

from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import Driver, engine, prompts_of
from near_transformers import GEMMA, check_plain_torch, expected, history, qwen3

from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.output.sampler import TorchHead

pytestmark = pytest.mark.gpu
PLAIN: dict[str, Any] = {"attention_backend": "torch", "dtype": "float32", "load_format": "auto"}


@pytest.mark.parametrize("name", GEMMA)
def test_gemma(name: str, tmp_path: Path) -> None:
    check_plain_torch(name, tmp_path, "cuda")


def test_float32_logits_equal_transformers(tmp_path: Path) -> None:
    theirs, driver = qwen3(tmp_path), history(engine(tmp_path, **PLAIN))
    assert isinstance(driver.engine.head, TorchHead)
    found = torch.stack([seen.logits for seen in driver.seen])
    torch.testing.assert_close(found, expected(theirs, driver), atol=2e-4, rtol=2e-4)


def test_the_same_tokens_as_on_a_cpu(tmp_path: Path) -> None:
    """Draws by seed, truncation, penalties: all that a head does."""
    qwen3(tmp_path)
    params = SamplingParams(max_tokens=12, temperature=0.7, top_p=0.9, repetition_penalty=1.1, logprobs=2, seed=3)
    found = []
    for device in ("cuda", "cpu"):
        driver = Driver(engine(tmp_path, device=device, **PLAIN), prompts_of([30, 40]), params)
        driver.step({0: 30, 1: 20})
        driver.step({0: 1, 1: 20})
        for _ in range(9):
            driver.step({0: 1, 1: 1})
        found.append(driver.tokens)
    assert found[0] == found[1]
