"""Decodes of one row whose products send and receive the sums, against the same with sums by gloo; each rank a process of its own."""

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from one_row_rank import DECODES, HIDDEN, ROWS, SIZE, run_rank
from small_models import SMALL

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
    wrong, *ways = found[0]
    assert wrong == "", "the proof at start"
    by_gloo, by_packets = ([torch.tensor(one) for one in way] for way in ways)
    assert len(by_packets) == 1 + len(DECODES) + 2
    spread = by_gloo[1].std()
    for one, other in zip(by_packets, by_gloo, strict=True):
        assert (one - other).abs().max() < 0.1 * spread
    assert not torch.equal(by_packets[1], by_gloo[1]), "packets were used: other roundings"
    assert all(bool((inbox != 0).any()) for inbox in memory)
    assert all(bool((inbox[32:] != 0).any()) for inbox in more), "logits too"
