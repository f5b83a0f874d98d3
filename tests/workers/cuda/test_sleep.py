"""An engine that sleeps gives the GPU its memory back, and computes what it did before when it has it again, from CUDA graphs."""

from pathlib import Path

import pytest
import torch

from meshlm.protocol.sampling import SamplingParams
from meshlm.protocol.sleeping import KV_CACHE, TAGS

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import Driver, engine, prompts_of

from meshlm.workers.engine.engine import ModelEngine
from meshlm.workers.weights.load import weight_bytes

pytestmark = pytest.mark.gpu
LENGTHS = [40, 333, 129, 17]
PIECE = 20 << 20  # bytes that torch asks of the GPU at a time; one that also holds a tensor of an earlier test stays


def logits_of(made: ModelEngine) -> tuple[list[torch.Tensor], list[list[int]]]:
    driver = Driver(made, prompts_of(LENGTHS), SamplingParams(max_tokens=12, temperature=0.0))
    rows = [driver.step(dict(enumerate(LENGTHS)))]
    for _ in range(8):
        rows.append(driver.step(dict.fromkeys(range(len(LENGTHS)), 1)))
    made.reset()
    return rows, driver.tokens


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
def test_memory_goes_and_comes(tmp_path: Path, mode: str) -> None:
    made = engine(tmp_path, cudagraph_mode=mode, cudagraph_capture="start")
    before, tokens = logits_of(made)
    kv = sum(cache.keys.nbytes + cache.values.nbytes for cache in made.compute.caches)
    whole = weight_bytes(made.model) + kv
    weights = weight_bytes(made.model)
    for _ in range(2):
        torch.cuda.empty_cache()
        held, used = torch.cuda.memory_reserved(), [torch.cuda.memory_allocated()]
        made.be_without(TAGS)
        assert held - torch.cuda.memory_reserved() > 0.95 * whole - 2 * PIECE  # weights' and the KV cache's pieces
        used.append(torch.cuda.memory_allocated())
        made.be_without((KV_CACHE,))
        assert held - torch.cuda.memory_reserved() > 0.95 * kv - 2 * PIECE
        used.append(torch.cuda.memory_allocated())
        assert used[0] - used[1] >= whole
        assert weights <= used[2] - used[1] < weights + PIECE  # a library may take its workspace anew
        made.be_without(())
        replays = sum(made.graph_counts().replays.values())
        after, again = logits_of(made)
        assert again == tokens
        for row, same in zip(before, after, strict=True):
            torch.testing.assert_close(row, same, atol=0, rtol=0)
        assert (sum(made.graph_counts().replays.values()) > replays) is (mode == "FULL")
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() - held < 0.1 * whole + 2 * PIECE  # what a start left over may have gone
