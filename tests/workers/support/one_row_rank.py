"""One rank of test_one_row.py: a process of its own, so importable by name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from small_models import BLOCK, CPU, batch_of, caches, resolved
from torch import Tensor

from meshlm.kernels.allreduce_rmsnorm import kernel
from meshlm.workers.attention.backend import choose
from meshlm.workers.distributed import symmetric
from meshlm.workers.distributed.communicator import Distributed
from meshlm.workers.distributed.shard import Shard
from meshlm.workers.distributed.symmetric import OneRow
from meshlm.workers.layers import cpu_ops
from meshlm.workers.layers.ops import TorchOps
from meshlm.workers.layers.summing_ops import SummingOps
from meshlm.workers.models.decoder import Decoder
from meshlm.workers.weights.load import load_model

SIZE, HIDDEN, ROWS = 2, 48, 4
BF16 = torch.bfloat16
PROMPT, DECODES = [5, 9, 100, 7, 3, 44, 201], [17, 3, 90]
BLOCKS = [7, 3, 11, 0]


class WithWorkspace(Distributed):
    """gloo for steps of many rows."""

    def __init__(self, shard: Shard, one_row: OneRow | None) -> None:
        super().__init__(shard, None)
        self.one_row = one_row

    def all_reduce(self, x: Tensor) -> Tensor:
        return super().all_reduce(x.contiguous())


def one_row_of(rank: int, memory: list[Tensor], more: list[Tensor]) -> OneRow:
    """memory, more: packets of each rank."""
    addresses = torch.tensor([t.data_ptr() for t in memory])
    used = 0

    def share(count: int) -> Tensor:
        nonlocal used
        found = torch.tensor([t.data_ptr() for t in more]) + 8 * used
        used += count
        assert used <= more[0].numel()
        return found

    turns = torch.ones(ROWS, dtype=torch.int32)
    return OneRow(kernel.Workspace(rank, SIZE, ROWS, HIDDEN, (addresses, addresses, addresses), turns, ROWS), share)


def logits(model: Decoder) -> list[Tensor]:
    """Of a prompt, then of decodes of one row, then of two rows, then of one."""
    backend = choose("torch", model.local, CPU, BF16, BLOCK)
    cache = [type(one)(one.keys.to(BF16), one.values.to(BF16)) for one in caches(model.local, 24)]
    steps = [[(PROMPT, 0, BLOCKS)]]
    steps += [[([token], len(PROMPT) + nth, BLOCKS)] for nth, token in enumerate(DECODES)]
    steps += [[([3], 10, BLOCKS), ([4], 0, [15, 16, 17, 18])], [([8], 11, BLOCKS)]]
    found = []
    for step in steps:
        batch = batch_of(step)
        found.append(model.logits(model(batch, cache, backend.step(batch, BLOCK))))
    return found


def sums_without_a_norm(model: Decoder) -> list[Any]:
    """An embedding that is finished while in flight, and the same summed by gloo."""
    assert model.embed is not None
    assert isinstance(model.ops, SummingOps)
    table, rows = model.embed.weight.to(BF16), (model.embed.begin, model.embed.end)
    norm = (torch.ones(HIDDEN, dtype=BF16), 1e-6)
    sent, _ = model.ops.embed_part(torch.tensor([5]), table, rows, norm)
    term, _ = model.ops.base.embed_part(torch.tensor([5]), table, rows, norm)
    both = [model.ops.finish_sum(one, BF16).float().tolist() for one in (sent, term)]
    return [sent.kind.name, term.kind.name, *both]


def run_rank(
    rank: int, path: str, meeting: str, memory: list[Tensor], more: list[Tensor], answers: Any, done: Any
) -> None:
    torch.set_num_threads(1)
    cpu_ops.available = lambda: False  # weights as they are
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=SIZE)
    shard = Shard(rank, SIZE)
    found: list[Any] = []
    with torch.inference_mode():
        one_row = one_row_of(rank, memory, more)
        made: Any = SimpleNamespace(one_row=one_row, device=CPU)
        found.append(symmetric.wrong_results(symmetric.parts(made, shard, HIDDEN)))
        model = load_model(resolved(Path(path), "dummy"), CPU, 0, lambda done, total: None, shard).to(BF16)
        model.rope = model.rope.float()
        model._head_weight = model._head_weight.to(BF16)
        for used in (None, one_row):
            model.ops = TorchOps()
            model.join(WithWorkspace(shard, used))
            found.append([one.float().tolist() for one in logits(model)])
        found.append(sums_without_a_norm(model))
    answers.put((rank, found))
    done.wait()  # the peers may still read
    dist.destroy_process_group()
