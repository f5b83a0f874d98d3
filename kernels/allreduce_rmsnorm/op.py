"""The record of the sum over ranks with its norm, by rows and protocol: `python -P -m meshlm.kernels.bench allreduce_rmsnorm --gpus 2`.

`norm` is the same without a sum (kernels/norm): what one GPU alone needs. tests/kernels/test_allreduce_rmsnorm.py has the odd sizes.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from meshlm.kernels.allreduce_rmsnorm import kernel, reference
from meshlm.kernels.norm.kernel import add_rms_norm
from meshlm.kernels.op import Case, Launch, Op

EPS = 1e-5


def workspace_of(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> tuple[kernel.Workspace, object]:
    """A room in symmetric memory of this rank's group, and what must be kept while it is used. Collective."""
    import torch.distributed._symmetric_memory as symm_mem

    rank, size = dist.get_rank(), dist.get_world_size()
    kept, addresses = [], []
    for count, kind in (
        (2 * size * rows * kernel.words(columns, dtype), torch.int64),
        (2 * size * rows * columns, dtype),
        (size * rows, torch.int32),
    ):
        memory = symm_mem.empty(count, dtype=kind, device=device)
        memory.zero_()
        handle = symm_mem.rendezvous(memory, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        kept.append((memory, handle))
        addresses.append(torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device))
    torch.cuda.synchronize()
    dist.barrier()
    turns = torch.ones(rows, dtype=torch.int32, device=device)
    return kernel.Workspace(rank, size, rows, columns, (addresses[0], addresses[1], addresses[2]), turns, rows), kept


def _make(dtype: torch.dtype, device: torch.device, protocol: str, rows: int, columns: int) -> Launch:
    workspace, kept = workspace_of(rows, columns, dtype, device)
    workspace.packet_rows = rows if protocol == "packets" else 0
    parts = [
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(rank)).to(device, dtype)
        for rank in range(workspace.size)
    ]
    residual, weight = parts[0] * 0.5, torch.linspace(0.5, 1.5, columns).to(device, dtype)

    def run(memory: object = kept) -> list[Tensor]:
        return [kernel.allreduce_rmsnorm(parts[workspace.rank], residual, weight, EPS, workspace), residual]

    def expected() -> list[Tensor]:
        return list(reference.allreduce_rmsnorm(parts, residual.clone(), weight, EPS))

    return Launch(run, expected, beside={"norm": lambda: add_rms_norm(parts[0], residual, weight, EPS)})


OF_MODELS: list[Case] = [(way, rows, 4096) for way in ("packets", "flags") for rows in (1, 2, 4, 8, 16, 32, 64)]
OPS = (Op("allreduce_rmsnorm", _make, (), OF_MODELS, near=4, peers=True),)
