"""What workers/distributed/symmetric.py makes of torch's symmetric memory, with threads for GPUs and a stand-in for the library."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from meshlm.workers.distributed import symmetric
from meshlm.workers.distributed.communicator import Distributed
from meshlm.workers.distributed.shard import Shard

SIZE, LIMIT_S = 2, 20


class Peers:
    """The ranks' buffers, by the order in which each makes them; names of groups are "0" and "1", the ranks."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(SIZE)
        self.buffers: list[list[Tensor]] = [[] for _ in range(SIZE)]
        self.lines = [torch.empty(0)] * SIZE  # that NCCL sums
        self.used: set[str] = set()
        self.wrong = ""  # an operation that gives no sum

    def meet(self) -> None:
        self.barrier.wait(LIMIT_S)

    def sum(self, kind: str, workspace: Tensor, out: Tensor) -> None:
        self.used.add(kind)
        self.meet()
        count = workspace.numel()
        total = torch.stack([mine[0][:count] for mine in self.buffers]).sum(0)
        self.meet()
        out.copy_(torch.zeros_like(out) if kind == self.wrong else total.view(out.shape))


class Handle:
    def __init__(self, peers: Peers, nth: int) -> None:
        self._peers, self._nth = peers, nth
        self.buffer_ptrs = [0] * SIZE

    def barrier(self, channel: int) -> None:
        self._peers.meet()

    def get_buffer(self, rank: int, shape: list[int], dtype: torch.dtype) -> Tensor:
        count = shape[0] * shape[1]
        return self._peers.buffers[rank][self._nth][:count].view(shape)


class Plain:
    """In the place of NCCL."""

    def __init__(self, peers: Peers, rank: int) -> None:
        self._peers, self._rank, self.send, self.receive = peers, rank, None, None

    def all_reduce(self, x: Tensor) -> Tensor:
        peers = self._peers
        peers.used.add("nccl")
        peers.lines[self._rank] = x
        peers.meet()
        total = torch.stack(peers.lines).sum(0)
        peers.meet()
        return total


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    found = Peers()

    def shared(self: Any, count: int, dtype: torch.dtype) -> tuple[Tensor, Handle]:
        mine = found.buffers[int(self._name)]
        mine.append(torch.zeros(count, dtype=dtype))
        found.meet()
        return mine[-1], Handle(found, len(mine) - 1)

    def one_shot(workspace: Tensor, x: Tensor, operation: str, name: str, out: Tensor) -> None:
        workspace.copy_(x)
        found.sum("one-shot", workspace, out)

    def two_shot(workspace: Tensor, operation: str, name: str, out: Tensor) -> None:
        found.sum("two-shot", workspace, out)

    monkeypatch.setattr(symmetric.Symmetric, "_shared", shared)
    monkeypatch.setattr(Distributed, "all_reduce", lambda self, x: Plain(found, self._shard.tp_rank).all_reduce(x))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce_copy_out", one_shot)
    monkeypatch.setattr(torch.ops.symm_mem, "two_shot_all_reduce_out", two_shot)
    monkeypatch.setattr(symmetric, "all_say_yes", lambda yes, group: yes)  # the ranks are alike here
    return found


def make(peers: Peers, rank: int, widest: tuple[int, int] = (64, 4096)) -> Any:
    group: Any = type("Group", (), {"group_name": str(rank)})
    plain: Any = Plain(peers, rank)
    return symmetric.make_symmetric(Shard(rank, SIZE), group, torch.device("cpu"), torch.float32, widest, plain)


def both(work: Any) -> list[Any]:
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(work, range(SIZE)))


def no_fused(*arguments: object) -> Tensor:
    raise RuntimeError("no such kernel")


@pytest.mark.filterwarnings("ignore:kernels/allreduce_rmsnorm is wrong here")
def test_sums_by_size_and_gathering_in_parts(peers: Peers, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshlm.kernels.allreduce_rmsnorm import kernel

    monkeypatch.setattr(kernel, "allreduce_rmsnorm", no_fused)
    made = both(lambda rank: make(peers, rank))
    assert all(isinstance(one, symmetric.Symmetric) for one in made)
    assert not any(one.fused for one in made)
    x = torch.ones(1, 4096)
    assert made[0].allreduce_rmsnorm(x, x, x[0], 1e-6) is None
    assert all(bool((one.workspace.turns == symmetric.FRESH_TURN).all()) for one in made), (
        "the same on all, whatever went wrong"
    )
    for rows, kind in ((2, "one-shot"), (60, "two-shot"), (200, "nccl")):
        peers.used.clear()
        lines = [torch.full((rows, 4096), float(rank + 1)) for rank in range(SIZE)]
        found = both(lambda rank, lines=lines: made[rank].all_reduce(lines[rank]))
        assert peers.used == {kind}
        assert all(bool((one == 3).all()) for one in found)
    parts = torch.randn(SIZE, 700, 1000)  # the buffer holds 262 rows
    out = [torch.zeros(700, 1999) for _ in range(SIZE)]
    both(lambda rank: made[rank].gather(parts[rank], 1999, out[rank]))
    wanted = torch.cat(list(parts), dim=1)[:, :1999]
    assert torch.equal(out[0], wanted)
    assert torch.equal(both(lambda rank: made[rank].gather(parts[rank], 1999))[1], wanted)


@pytest.mark.filterwarnings("ignore:symmetric memory is wrong here")
@pytest.mark.parametrize("wrong", ["one-shot", "two-shot"])
def test_wrong_sums_leave_it_to_nccl(peers: Peers, wrong: str) -> None:
    peers.wrong = wrong
    for made in both(lambda rank: make(peers, rank, (8192, 256))):
        assert isinstance(made, Plain)
