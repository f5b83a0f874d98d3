"""Decodes of one row whose products send and receive the sums, against the same with sums by gloo; each rank a process of its own."""

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from one_row_rank import DECODES, HIDDEN, ROWS, SIZE, run_rank
from small_models import SMALL

from meshlm.kernels.allreduce_rmsnorm.kernel import Workspace
from meshlm.kernels.embedding import kernel as embedding
from meshlm.kernels.gemv.kernel import Turn
from meshlm.workers.distributed import symmetric

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="by the interpreter; test_parallel.py has the GPUs")


def test_products_that_sum_by_themselves(tmp_path: Path) -> None:
    config = {
        **SMALL,
        "vocab_size": 212,
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "initializer_range": 0.1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    context = multiprocessing.get_context("spawn")
    answers, done = context.Queue(), context.Event()
    memory = [torch.zeros(2, SIZE, ROWS, HIDDEN // 2, dtype=torch.int64).share_memory_() for _ in range(SIZE)]
    more = [torch.zeros(1000, dtype=torch.int64).share_memory_() for _ in range(SIZE)]
    meeting = str(tmp_path / "store")
    ranks = [
        context.Process(target=run_rank, args=(rank, str(tmp_path), meeting, memory, more, answers, done))
        for rank in range(SIZE)
    ]
    for process in ranks:
        process.start()
    try:
        found = dict(answers.get(timeout=60) for _ in ranks)
        done.set()
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert found[0] == found[1], "bit for bit"
    wrong, *ways, (kind, other_kind, finished, summed) = found[0]
    assert wrong == "", "the proof at start"
    by_gloo, by_packets = ([torch.tensor(one) for one in way] for way in ways)
    assert len(by_packets) == 1 + len(DECODES) + 2
    spread = by_gloo[1].std()
    for one, other in zip(by_packets, by_gloo, strict=True):
        assert (one - other).abs().max() < 0.1 * spread
    assert not torch.equal(by_packets[1], by_gloo[1]), "packets were used: other roundings"
    assert (kind, other_kind) == ("IN_FLIGHT", "RANK")
    assert finished == summed
    assert any(finished[0])
    assert all(bool((inbox != 0).any()) for inbox in memory)
    assert all(bool((inbox[32:] != 0).any()) for inbox in more), "logits too"


@pytest.mark.parametrize("under_way", [True, False])
def test_a_capture_that_failed_leaves_no_turn_behind(monkeypatch: pytest.MonkeyPatch, under_way: bool) -> None:
    """The step is captured again, from its first sum on; nothing of the first attempt ran."""
    turns: list[int] = []
    line = torch.zeros(1, 8, dtype=torch.bfloat16)
    weight = torch.zeros(8, 8, dtype=torch.bfloat16)

    def embed(ids: torch.Tensor, table: torch.Tensor, first: int, turn: Turn) -> torch.Tensor:
        turns.append(turn.nth)
        return torch.empty_like(line)

    monkeypatch.setattr(embedding, "send", embed)
    monkeypatch.setattr(symmetric, "gemv", lambda x, *rest, **named: (torch.empty_like(line), line))
    monkeypatch.setattr(symmetric, "pays", lambda weight, rows: True)
    addresses = torch.zeros(2, dtype=torch.int64)
    workspace = Workspace(0, 2, 4, 8, (addresses, addresses, addresses), torch.ones(4, dtype=torch.int32), 4)
    sums = symmetric.OneRow(workspace, lambda count: addresses)
    part = sums.send_row(torch.zeros(1, dtype=torch.int64), weight, 0)
    if not under_way:
        sums.norm_linear(part, None, (line[0], 1e-6), weight, None, gate="")
    again = sums.send_row(torch.zeros(1, dtype=torch.int64), weight, 0)
    assert turns == [0, 0]
    with pytest.raises(AssertionError, match="not been received"):
        sums.send(line, weight, None)
    assert sums.norm_linear(again, None, (line[0], 1e-6), weight, None, gate="") is not None
    assert sums.send(line, weight, None) is not None


def test_a_sum_by_other_means_must_not_take_the_turn_of_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses, weight = torch.zeros(2, dtype=torch.int64), torch.zeros(8, 8, dtype=torch.bfloat16)
    workspace = Workspace(0, 2, 4, 8, (addresses, addresses, addresses), torch.ones(4, dtype=torch.int32), 4)
    sums = symmetric.OneRow(workspace, lambda count: addresses)
    monkeypatch.setattr(symmetric, "pays", lambda weight, rows: False)
    assert sums.send(weight[:1], weight, None) is None
    sums._nth = 1
    with pytest.raises(AssertionError, match="count its turn from 0"):
        sums.send(weight[:1], weight, None)
