"""At each start: do sums through peer memory give what they must? Known numbers, every way of summing, both halves of the inboxes.

Collective: all ranks of a group run the same tests at the same time. Used by symmetric.py.
"""

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.precompile import precompiled
from meshlm.kernels.self_test import Result
from meshlm.workers.distributed.communicator import FUSED_ROWS, Distributed
from meshlm.workers.distributed.shard import Shard

if TYPE_CHECKING:
    from meshlm.workers.distributed.symmetric import Symmetric

NEAR = 0.03  # of norms


def result(name: str, found: Tensor | None, wanted: Tensor, near: float = 0.0) -> Result:
    """The value that a sum gave, beside the one that it must give."""
    return Result(name, torch.inf if found is None else (found - wanted).abs().max(), near)


def compile_all(made: "Symmetric", shard: Shard, dtype: torch.dtype, columns: int) -> None:
    """Make the kernels of `norms` and `parts`, and what memory they share, such that no test waits for a rank that compiles.

    Where Triton cannot compile apart from launching, they are launched, on every rank as often; what comes of it means nothing.
    """
    with precompiled():
        for _ in chain(norms(made, shard, dtype, columns), parts(made, shard, columns)):
            pass
    torch.cuda.synchronize()


def wrong(results: Iterator[Result]) -> str:
    """Names; "" when all is right. All are launched, whatever comes of the first: the other ranks wait for this one in each."""
    return ", ".join([one.what for one in results if one.wrong()])


def sums(made: "Symmetric", plain: Distributed, shard: Shard, dtype: torch.dtype) -> Iterator[Result]:
    """Each kind of sum, and the gathering. Also NCCL's first call, which must not be in a graph."""
    size, device = shard.tp_size, made.device
    of_all = torch.tensor(size * (size + 1) // 2, dtype=dtype, device=device)
    for rows in (1, 3, 4096):
        x = torch.full((rows, 128 * size), float(shard.tp_rank + 1), dtype=dtype, device=device)
        yield result(f"sum of {rows} rows", made.all_reduce(x.clone()), of_all)
        found = made.gather(x[:, :128].contiguous(), 128 * size)
        wanted = torch.arange(1, size + 1, device=device, dtype=dtype).repeat_interleave(128)
        yield result(f"gathering of {rows} rows", found, wanted)
    ones = torch.ones(8, dtype=dtype, device=device)
    yield result("NCCL", plain.all_reduce(ones.clone()), ones * size)


def norms(made: "Symmetric", shard: Shard, dtype: torch.dtype, columns: int) -> Iterator[Result]:
    """Sums with a norm behind them, of one row, few and many."""
    size, device = shard.tp_size, made.device
    weight = torch.ones(columns, dtype=dtype, device=device)
    steps = torch.arange(columns, device=device) % 8
    for rows in (1, FUSED_ROWS, 2, 1, made.workspace.packet_rows, 1):
        x = (steps + shard.tp_rank).to(dtype).repeat(rows, 1)
        residual = torch.ones(rows, columns, dtype=dtype, device=device)
        normed = made.allreduce_rmsnorm(x, residual, weight, 1e-6)
        stream = (steps * size + size * (size - 1) // 2 + 1).to(dtype).repeat(rows, 1)
        yield result(f"sum of {rows} rows", residual, stream)
        yield result(f"norm of {rows} rows", normed, F.rms_norm(stream, (columns,), weight, 1e-6), NEAR)


def parts(made: "Symmetric", shard: Shard, columns: int) -> Iterator[Result]:
    """Products of one row that are summed, in steps with an odd number of sums. Nothing where there are none."""
    one_row, device, size, few = made.one_row, made.device, shard.tp_size, min(64, columns)
    if one_row is None:
        return
    steps = torch.arange(columns, device=device) % 8
    weight = torch.zeros(columns, 64, dtype=torch.bfloat16, device=device)
    weight[:, 5] = steps + shard.tp_rank
    x = torch.zeros(1, 64, dtype=torch.bfloat16, device=device)
    x[0, 5] = 1
    norm = torch.ones(columns, dtype=torch.bfloat16, device=device)
    following = torch.eye(few, columns, dtype=torch.bfloat16, device=device)
    total = steps * size + size * (size - 1) // 2
    for step in range(1, 4):
        stream = torch.zeros(1, columns, dtype=torch.bfloat16, device=device)
        for nth in range(1, 4):
            part = one_row.send(x, weight, None)
            assert part is not None
            if nth < 3:
                found = one_row.norm_linear(part, stream, (norm, 1e-6), following, None, gate="")
                assert found is not None
                out, stream = found
            else:
                out = one_row.norm(part, stream, norm, 1e-6)[:, :few]
            wanted = (nth * total).to(torch.bfloat16)[None]
            yield result(f"sum {nth} of step {step}", stream, wanted)
            yield result(f"norm {nth} of step {step}", out, F.rms_norm(wanted, (columns,), norm, 1e-6)[:, :few], NEAR)
        head = torch.zeros(16, 64, dtype=torch.bfloat16, device=device)
        head[:, 5] = torch.arange(16, device=device) + 16 * shard.tp_rank + step
        logits = one_row.logits(x, head, 16 * size - 2, None)
        yield result(f"columns of step {step}", logits, torch.arange(16 * size - 2, device=device)[None] + step)
