"""Makes a group's communicator once its ranks have met."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from meshlm.workers.distributed.communicator import Communicator, Distributed
from meshlm.workers.distributed.shard import Shard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

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
    custom_all_reduce: GPUs may sum through the memory of their peers. Otherwise NCCL is all there is.
    """
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
    if not _by_peer_memory(device, shard, interface, custom_all_reduce):
        return plain
    from meshlm.workers.distributed.symmetric import make_symmetric

    assert tensor is not None
    return make_symmetric(shard, tensor, device, dtype, widest, plain)


def set_environment(interface: str | None) -> None:
    """What gloo, NCCL and torch read when they first connect; what a user has set stays."""
    for name, value in {**ENVIRONMENT, **_interface_names(interface)}.items():
        os.environ.setdefault(name, value)


def _by_peer_memory(device: torch.device, shard: Shard, interface: str | None, custom_all_reduce: bool) -> bool:
    """Whether the tensor-parallel ranks try symmetric memory: GPUs of one host, if they may."""
    return custom_all_reduce and device.type == "cuda" and shard.tp_size > 1 and interface is None


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
