"""One rank of test_gemv_parts.py: a process of its own, so importable by name."""

import random
import time
from typing import Any, NamedTuple

import torch
from allreduce_rmsnorm_rank import COLUMNS, LATE_S, ROWS, workspace_of

from meshlm.kernels.allreduce_rmsnorm import kernel as sums
from meshlm.kernels.allreduce_rmsnorm import reference as sums_reference
from meshlm.kernels.gemv import kernel, reference

INPUTS, OUTPUTS, STEPS, EPS = 40, 14, 5, 1e-5
BF16 = torch.bfloat16


class Sum(NamedTuple):
    """One of a step. `following`: the weight of the product that receives it; None: allreduce_rmsnorm receives the step's last."""

    x: list[torch.Tensor]  # of each rank
    weights: list[torch.Tensor]
    bias: torch.Tensor  # of rank 0
    following: torch.Tensor | None
    gate: str


def random_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def steps(size: int) -> list[list[Sum]]:
    """Of one to four sums; the same on all ranks."""
    chance, found = random.Random(5), []
    for step in range(STEPS):
        count = chance.randint(1, 4)
        sums_of_step = []
        for nth in range(count):
            seed, gate = 1000 * step + 100 * nth, "" if nth % 2 else "silu"
            sums_of_step.append(
                Sum(
                    [random_of(seed + rank, 1, INPUTS) for rank in range(size)],
                    [random_of(seed + 20 + rank, COLUMNS, INPUTS) * 0.2 for rank in range(size)],
                    random_of(seed + 40, COLUMNS),
                    None if nth == count - 1 else random_of(seed + 41, 2 * OUTPUTS if gate else OUTPUTS, COLUMNS) * 0.2,
                    gate,
                )
            )
        found.append(sums_of_step)
    return found


NORM = torch.linspace(0.5, 1.5, COLUMNS).to(BF16)


def wanted(size: int) -> list[list[torch.Tensor]]:
    """What comes out of each sum, and the stream after it."""
    found = []
    for step, sums_of_step in enumerate(steps(size)):
        stream = random_of(step, 1, COLUMNS)
        for one in sums_of_step:
            parts = [
                reference.gemv(x, weight, one.bias if rank == 0 else None)[0]
                for rank, (x, weight) in enumerate(zip(one.x, one.weights, strict=True))
            ]
            normed, after = sums_reference.allreduce_rmsnorm(parts, stream, NORM, EPS)
            if one.following is None:
                found.append([normed, after])
            else:
                total = torch.stack([part.float() for part in parts]).sum(0).to(BF16)
                options: dict[str, Any] = {"norm": NORM, "residual": stream, "eps": EPS, "gate": one.gate}
                found.append(list(reference.gemv(total, one.following, **options)))
            stream = after
    return found


def run_rank(rank: int, memory: list[list[torch.Tensor]], answers: Any) -> None:
    torch.set_num_threads(1)
    size, chance, workspace = len(memory), random.Random(rank), workspace_of(rank, memory)

    def dawdle() -> None:
        if chance.random() < 0.3:
            time.sleep(chance.random() * LATE_S)

    found = []
    for step, sums_of_step in enumerate(steps(size)):
        stream = random_of(step, 1, COLUMNS)
        for nth, one in enumerate(sums_of_step):
            dawdle()
            turn = kernel.Turn(workspace, nth)
            bias = one.bias if rank == 0 else None
            x, _ = kernel.gemv(one.x[rank], one.weights[rank], bias, sends=turn, shape=(2, 4, 2, 1))
            dawdle()
            if one.following is None:
                out = sums.allreduce_rmsnorm(x, stream, NORM, EPS, workspace, sent=nth)
            else:
                options: dict[str, Any] = {"norm": NORM, "residual": stream, "eps": EPS, "gate": one.gate}
                out, stream = kernel.gemv(x, one.following, receives=turn, shape=(4, 4, 2, 1), **options)
            found.append([out.float().tolist(), stream.float().tolist()])
        for rows in (1, ROWS)[: step % 3]:  # steps of other numbers of rows between, by packets and by flags
            many = random_of(step, rows, COLUMNS)
            sums.allreduce_rmsnorm(many, many.clone(), NORM, EPS, workspace)
    answers.put((rank, found))
