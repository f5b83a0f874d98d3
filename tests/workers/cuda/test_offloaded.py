"""Weights on the host on a GPU: the same logits to the last bit, in CUDA graphs and without, and less of its memory."""

from pathlib import Path

import pytest
import torch
from engine_driver import Driver, engine, prompts_of

from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.weights import offload
from meshlm.workers.weights.reload import tensors_of

pytestmark = pytest.mark.gpu


def logits(made: ModelEngine) -> list[torch.Tensor]:
    driver = Driver(made, prompts_of([333, 140]), SamplingParams(max_tokens=20, temperature=0.0))
    driver.step({1: 140})
    driver.step({0: 200, 1: 1})
    driver.step({0: 133, 1: 1})
    for _ in range(6):
        driver.step({0: 1, 1: 1})
    made.reset()
    return [seen.logits for seen in driver.seen]


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_logits_are_near_those_of_weights_on_the_device(mode: str, tmp_path: Path) -> None:
    """Nothing is fused with products whose weights come, so numbers are rounded elsewhere. A second time they are equal to the last
    bit."""
    wanted = logits(engine(tmp_path, cudagraph_mode=mode, cudagraph_capture="start"))
    made = engine(tmp_path, cudagraph_mode=mode, cudagraph_capture="start", cpu_offload_gb=0.005)
    assert offload.is_offloaded(made.model)
    found = logits(made)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
    assert all(torch.equal(*pair) for pair in zip(logits(made), found, strict=True))


def test_a_gpu_keeps_less_of_them(tmp_path: Path) -> None:
    """Those of three layers stay on the host; two of each size are on the GPU."""
    kept = []
    for gib in (0.0, 0.01):
        begun = torch.cuda.memory_allocated()
        made = engine(tmp_path, cudagraph_mode="NONE", cpu_offload_gb=gib)
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_of(made.model) if tensor.is_cuda}
        kept.append(sum(tensor.untyped_storage().nbytes() for tensor in storages.values()))
        assert torch.cuda.memory_allocated() > begun
        del made
    assert kept[0] - kept[1] >= 0.01 * 2**30
