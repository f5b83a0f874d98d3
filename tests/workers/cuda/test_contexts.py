"""Graphs for short and for long contexts have the logits of steps that are launched kernel by kernel."""

from pathlib import Path

import pytest
import torch

from meshlm.protocol.sampling import SamplingParams
from meshlm.workers.engine import graph_steps

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from engine_driver import Driver, engine, prompts_of

from meshlm.kernels.attention import tiles
from meshlm.workers.attention import triton_backend
from meshlm.workers.engine import triton_kit
from meshlm.workers.graphs import dispatcher
from meshlm.workers.graphs.dispatcher import PATIENCE
from meshlm.workers.graphs.keys import LONG, SHORT

pytestmark = pytest.mark.gpu
BORDER = 256  # tokens of a context, of short and of long ones
LENGTHS = [40, 300, 420, 900]
CHUNK = 100


def steps_of(driver: Driver) -> None:
    """Decodes with short contexts, decodes with longer ones, and chunks of a prompt beside these."""
    driver.step({0: LENGTHS[0]})
    for _ in range(3):
        driver.step({0: 1})
    driver.step({1: LENGTHS[1]})
    for _ in range(3):
        driver.step({0: 1, 1: 1})
    driver.step({2: LENGTHS[2]})
    for _ in range(LENGTHS[3] // CHUNK):
        driver.step({0: 1, 1: 1, 2: 1, 3: CHUNK})


@pytest.mark.parametrize("seen", [BORDER, 1 << 16])
def test_logits_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: int) -> None:
    """seen: with the most each prompt token is said to see so much that Hopper's kernel is the one for it."""

    def tiles_of(programs: int, longest: int, device: torch.device, group: int, dim: int) -> tiles.Tile:
        """As if the table ended at BORDER."""
        return usual(programs, longest if longest <= BORDER else 1 << 16, device, group, dim)

    usual = tiles.decode_tiles
    for module in (tiles, triton_backend):  # triton_kit reads it of the first
        monkeypatch.setattr(module, "decode_tiles", tiles_of)
    for module in (triton_kit, dispatcher):
        monkeypatch.setattr(module, "LONG_CONTEXT", BORDER)
    for module in (tiles, graph_steps):
        monkeypatch.setattr(module, "SHORT_CONTEXT", BORDER)
    monkeypatch.setattr(graph_steps, "LONG_CONTEXT", seen)
    params = SamplingParams(max_tokens=64, temperature=0.0)
    drivers = []
    for mode in ("FULL", "NONE"):
        made = engine(tmp_path, cudagraph_mode=mode)
        drivers.append(Driver(made, prompts_of(LENGTHS), params))
        steps_of(drivers[-1])
        if mode == "FULL":
            assert any(key.contexts == SHORT for key in made.graphs._graphs), "this GPU has a table of its own"
            assert any(key.contexts == LONG for key in made.graphs._graphs)
            assert made.graphs.replays["mixed_long"] >= LENGTHS[3] // CHUNK - PATIENCE
    graphs, eager = drivers
    compared = 0
    for one, other in zip(graphs.seen, eager.seen, strict=True):
        assert one[:2] == other[:2]
        before = one.length - LENGTHS[one.row]
        if graphs.tokens[one.row][:before] == eager.tokens[one.row][:before]:  # else a near draw has parted them
            torch.testing.assert_close(one.logits, other.logits, atol=0.06, rtol=0.06)
            compared += 1
    assert compared > len(graphs.seen) // 2
