"""Graphs are recorded again after all earlier ones are gone, and their memory is there for others."""

import pytest
import torch

from meshlm.workers.graphs.dispatcher import Recorder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
MIB = 1 << 20


def test_a_pool_may_end() -> None:
    recorder = Recorder()
    x = torch.ones(16 * MIB, device="cuda")
    out = torch.zeros_like(x)

    def launch() -> None:
        out.copy_((x + 1) * 2)  # 64 MiB of the pool, twice

    launch()
    for turn in range(3):
        graphs = [recorder.record(launch) for _ in range(2)]
        out.zero_()
        graphs[1].replay()
        assert out.eq(4).all()
        held = torch.cuda.memory_reserved()
        graphs.clear()
        if turn == 1:  # the one graph of a pool is thrown away, since another rank has none
            recorder.record(launch)
        recorder.forget()
        assert torch.cuda.memory_reserved() <= held - 128 * MIB
