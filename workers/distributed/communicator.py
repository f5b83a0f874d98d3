"""What ranks of a group say to each other in a step (sums, columns, hidden states from stage to stage), and how they connect.

All ranks of a group run the same plans in the same order, so their calls meet. Called by the thread that steps.
"""

import os
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshlm.workers.distributed.shard import Shard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from meshlm.workers.distributed.symmetric import OneRow


# torch 2.13 has renamed it
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

FUSED_ROWS = 64  # of sums that may be one kernel with their norm: each rank sends each row to all others


class Communicator:
    """The tensor-parallel ranks of one stage, and the stages before and after it; this one is a group of one."""

    one_row: "OneRow | None" = None
    """The way in which products of one row sum over the ranks by themselves; None where they do not."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the tensor-parallel ranks, the same bits on each; may be x itself, overwritten."""
        return x

    def allreduce_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """residual += the sum of x over the ranks; the norm of that. None, and nothing is changed: not for this size or here."""
        return None

    def gather(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        """[l, w] of each tensor-parallel rank side by side -> [l, width]: what is right of `width` is padding."""
        assert out is None
        return x

    def send(self, x: Tensor) -> None:
        """Sends x to the next stage; x may be overwritten afterwards."""
        raise AssertionError("there is no next stage")

    def receive(self, into: Tensor) -> None:
        """Receives what the stage before sends."""
        raise AssertionError("there is no stage before")


SINGLE_RANK = Communicator()


def side_by_side(parts: list[Tensor], width: int, out: Tensor | None) -> Tensor:
    """[l, w] of each rank -> [l, width]."""
    if out is None:
        return torch.cat(parts, dim=1)[:, :width]
    each = parts[0].shape[1]
    for rank, part in enumerate(parts):
        have = min(each, width - rank * each)
        if have > 0:
            out[:, rank * each : rank * each + have].copy_(part[:, :have])
    return out


class Distributed(Communicator):
    """A communicator by torch.distributed: gloo for tensors on the CPU, NCCL on GPUs. `tensor` is the stage's group."""

    def __init__(self, shard: Shard, tensor: "dist.ProcessGroup | None") -> None:
        self._shard, self._tensor = shard, tensor
        self._sent: deque[tuple[Any, Tensor]] = deque()  # until they have left

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._shard.tp_size > 1:
            dist.all_reduce(x, group=self._tensor)
        return x

    def gather(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        if self._shard.tp_size == 1:
            return x if out is None else out.copy_(x)
        rows, each = x.shape
        flat = torch.empty(self._shard.tp_size * rows, each, dtype=x.dtype, device=x.device)
        _all_gather(flat, x.contiguous(), group=self._tensor)
        return side_by_side(list(flat.chunk(self._shard.tp_size)), width, out)

    def send(self, x: Tensor) -> None:
        copy = x.clone()
        self._sent.append((dist.isend(copy, self._shard.rank + self._shard.tp_size), copy))
        while len(self._sent) > self._shard.pp_size + 1:  # no more steps than that are in flight: it has arrived
            self._sent.popleft()[0].wait()

    def receive(self, into: Tensor) -> None:
        work = dist.irecv(into, self._shard.rank - self._shard.tp_size)
        assert work is not None
        work.wait()


ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",  # no NVLink multicast: it needs the fabric manager, and one-shot sums are as fast without
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
TIMEOUT = timedelta(minutes=10)  # of one collective; a peer's death is noticed by the mesh long before


def connect(
    store: "Store",
    shard: Shard,
    device: torch.device,
    dtype: torch.dtype,
    widest: tuple[int, int],
    interface: str | None = None,
    *,
    custom_all_reduce: bool = True,
) -> Communicator:
    """Collective: all ranks of the group call it. What is summed is as large as `widest` [tokens, columns].

    interface: by which this host's ranks speak with those of other hosts. None: no other host has ranks of the group.
    custom_all_reduce: GPUs may sum through the memory of their peers. Otherwise NCCL is all there is."""
    set_environment(interface)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=shard.rank, world_size=shard.size, timeout=TIMEOUT)
    tensor = dist.group.WORLD
    if shard.pp_size > 1:
        for stage in range(shard.pp_size):
            ranks = range(stage * shard.tp_size, (stage + 1) * shard.tp_size)
            group = dist.new_group(list(ranks), timeout=TIMEOUT)
            tensor = group if stage == shard.pp_rank else tensor
    plain = Distributed(shard, tensor)
    if device.type == "cuda":
        _say_hello(plain, shard, device, dtype)
    # GPUs of one host
    if not custom_all_reduce or device.type != "cuda" or shard.tp_size == 1 or interface is not None:
        return plain
    from meshlm.workers.distributed.symmetric import make_symmetric

    assert tensor is not None
    return make_symmetric(shard, tensor, device, dtype, widest, plain)


def set_environment(interface: str | None) -> None:
    """Sets what gloo, NCCL and torch read when they first connect; what a user has set stays."""
    for name, value in {**ENVIRONMENT, **_interface_names(interface)}.items():
        os.environ.setdefault(name, value)


def _interface_names(interface: str | None) -> dict[str, str]:
    """The settings that make gloo and NCCL listen on the private interface alone."""
    if interface is None:
        return {"GLOO_SOCKET_IFNAME": "lo"}
    if not interface:  # they choose
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}  # without "=" a prefix of names


def _say_hello(plain: Distributed, shard: Shard, device: torch.device, dtype: torch.dtype) -> None:
    """NCCL connects two stages when they first speak, which takes a second: no request should wait for it."""
    line = torch.zeros(8, device=device, dtype=dtype)
    if not shard.is_first:
        plain.receive(line)
    if not shard.is_last:
        plain.send(line)
    torch.cuda.synchronize()
