"""Decodes on a GPU that share a prefix have the logits that they have alone, eager and from CUDA graphs."""

from pathlib import Path

import numpy as np
import pytest
import torch

from meshlm.protocol.edges.step import NewRow
from meshlm.protocol.sampling import SamplingParams

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import BLOCK, Driver, engine, prompts_of
from msgspec.structs import replace

from meshlm.workers.graphs.dispatcher import PATIENCE_SHARED
from meshlm.workers.rows import shared_prefixes

pytestmark = pytest.mark.gpu
PREFIX, REQUESTS = 512, 9
PARAMS = SamplingParams(max_tokens=64, temperature=0.0)


class Sharing(Driver):
    """All rows but the last begin with the first row's pages."""

    def _row(self, row: int, tokens: list[int]) -> NewRow:
        new = super()._row(row, tokens)
        if row == REQUESTS - 1:
            return new
        blocks = np.frombuffer(new.block_ids, np.int32).copy()
        blocks[: PREFIX // BLOCK] = np.arange(PREFIX // BLOCK)
        return replace(new, block_ids=blocks.tobytes())


def steps_of(driver: Driver) -> list[torch.Tensor]:
    """Logits of decodes, of decodes beside a prompt, and of many decodes more."""
    driver.engine.reset()
    for row in range(REQUESTS - 1):
        cached = PREFIX if row and isinstance(driver, Sharing) else 0
        driver.computed[row] = cached
        driver.step({row: len(driver.prompts[row]) - cached})
    ones = dict.fromkeys(range(REQUESTS - 1), 1)
    found = [driver.step(ones) for _ in range(2)]
    found.append(driver.step({**ones, REQUESTS - 1: len(driver.prompts[-1])}))
    return found + [driver.step(dict.fromkeys(range(REQUESTS), 1)) for _ in range(PATIENCE_SHARED + 4)]


@pytest.mark.parametrize("mode", ["FULL", "NONE"])
@pytest.mark.parametrize("off", [False, True])
def test_logits_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, off: bool) -> None:
    """Of decodes, and of decodes beside a prompt. off: --disable-cascade-attn."""
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED", 1)
    made = engine(tmp_path, cudagraph_mode=mode, disable_cascade_attn=off)
    assert (made.rows.prefixes is None) == off
    prefix, *tails = prompts_of([PREFIX, *range(20, 20 + REQUESTS)])
    prompts = [prefix + tail for tail in tails]
    alone, sharing = Driver(made, prompts, PARAMS), Sharing(made, prompts, PARAMS)
    expected, found = steps_of(alone), steps_of(sharing)
    compared = 0
    for nth, (one, other) in enumerate(zip(expected, found, strict=True)):
        for row in range(len(one)):
            if alone.tokens[row][: nth + 1] == sharing.tokens[row][: nth + 1]:  # else a near draw has parted them
                torch.testing.assert_close(one[row], other[row], atol=0.06, rtol=0.06)
                compared += 1
    assert compared > 3 * REQUESTS
    assert (made.graphs.replays["decode_shared"] > 0) == (mode == "FULL" and not off)
