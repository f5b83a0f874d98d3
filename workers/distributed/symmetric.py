"""Collectives over NVLink through each other's memory (torch symmetric memory), inside CUDA graphs; NCCL for what is too large.

Sums of few rows are one kernel with the addition and the norm behind them (kernels/allreduce_rmsnorm). One-shot: every rank reads all
peers' inputs and sums them. Two-shot: every rank sums a part and reads the others' sums: less traffic, one more round. Both wait for
all ranks before and after, so the buffer may be written again at once. Without multicast.

With one row there is no kernel for a sum: products send their parts to all ranks, products that follow receive them (kernels/gemv).

    embedding, o or down -> packets in every rank's inbox -> the norm in front of gate and up, or of the next layer's qkv

The head's columns go the same way, in a room of their own. Turns of a step are counted here, behind the last allreduce_rmsnorm, which
ends every step and so advances the count on the device: a CUDA graph replays with new numbers.
"""

import warnings
from collections.abc import Callable, Iterator
from itertools import chain

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshlm.kernels.allreduce_rmsnorm import kernel
from meshlm.kernels.allreduce_rmsnorm.kernel import Workspace, allreduce_rmsnorm
from meshlm.kernels.embedding import kernel as embedding
from meshlm.kernels.gemv import side_by_side as columns_of_ranks
from meshlm.kernels.gemv.kernel import Turn, gemv, pays
from meshlm.kernels.packets import FOR_EVER
from meshlm.kernels.precompile import precompiled
from meshlm.kernels.self_test import Result, in_one_line
from meshlm.workers.distributed.communicator import FUSED_ROWS, Communicator, Distributed, side_by_side
from meshlm.workers.distributed.shard import Shard


class OneRow:
    """All ranks make the same calls. At most one sum is on its way."""

    def __init__(self, workspace: Workspace, share: Callable[[int], Tensor]) -> None:
        """share: so many int64 zeros of each rank, that all can reach; their addresses by rank. Collective."""
        self.workspace, self._share, self.patience = workspace, share, FOR_EVER
        self._heads: dict[int, Workspace] = {}  # by columns of a rank
        self._nth = 0  # of the next sum, behind the last allreduce_rmsnorm
        self._in_flight = False  # that sum was sent and has not been received
        self._zeros = torch.zeros(1, workspace.columns, dtype=torch.bfloat16, device=workspace.turns.device)

    def send(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """x W^T + b, this rank's term of a sum; what is returned has the sum's shape and no content. None: not for this size."""
        assert not self._in_flight, "the sum before has not been received"
        if not pays(weight, x.shape[0]) or weight.shape[0] != self.workspace.columns:
            assert self._nth == 0, "the allreduce_rmsnorm that does this one would count its turn from 0"
            return None
        sent, _ = gemv(x, weight, bias, sends=Turn(self.workspace, self._nth))
        self._in_flight = True
        return sent

    def send_row(self, ids: Tensor, table: Tensor, first: int) -> Tensor:
        """The same of a row of a table, of which this rank has those of ids from `first` on. It begins a step.

        What is left of a step before was never launched: its capture failed."""
        self._nth = 0
        self._in_flight = True
        return embedding.send(ids, table, first, Turn(self.workspace, self._nth))

    def norm_linear(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm: tuple[Tensor, float],
        weight: Tensor,
        bias: Tensor | None,
        *,
        gate: str,
    ) -> tuple[Tensor, Tensor] | None:
        """See `Ops.norm_linear`, of the sum in flight, whose shape x has. None, and it is still in flight: not for this weight."""
        residual = self._zeros if residual is None else residual
        if not pays(weight, 1) or (gate and bias is not None):
            return None
        turn = Turn(self.workspace, self._nth, self.patience)
        found = gemv(x, weight, bias, norm=norm[0], residual=residual, eps=norm[1], gate=gate, receives=turn)
        self._in_flight, self._nth = False, self._nth + 1
        return found

    def norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += the sum in flight, whose shape x has; the norm of that."""
        assert self._in_flight, "no sum was sent"
        found = allreduce_rmsnorm(x, residual, weight, eps, self.workspace, self.patience, sent=self._nth)
        self._in_flight, self._nth = False, 0
        return found

    def receive(self, x: Tensor) -> Tensor:
        """The sum in flight alone, whose shape x has: what `norm` adds to a residual of zeros."""
        found = torch.zeros_like(x)
        self.norm(x, found, self._zeros[0], 1.0)
        return found

    def logits(self, hidden: Tensor, weight: Tensor, width: int, out: Tensor | None) -> Tensor | None:
        """hidden W^T of each rank side by side, [1, width]; what is right of it is padding. None: not for this size.

        The first call for a size makes room for it, so it must not be in a CUDA graph."""
        each = weight.shape[0]
        if hidden.shape[0] != 1 or each % 2 or width % 2 or not pays(weight, 1):
            return None
        if each not in self._heads:
            addresses = self._share(2 * self.workspace.size * each // 2)
            turns = torch.tensor([1, 0], dtype=torch.int32, device=addresses.device)
            three = (addresses, addresses, addresses)
            self._heads[each] = Workspace(self.workspace.rank, self.workspace.size, 1, each, three, turns, 1)
        turn = Turn(self._heads[each], 0, self.patience)
        gemv(hidden, weight, sends=turn)
        whole = out if out is not None else torch.empty(1, width, dtype=hidden.dtype, device=hidden.device)
        return columns_of_ranks.side_by_side(whole, turn)


NEAR = 0.03  # of norms


def result(name: str, found: Tensor | None, wanted: Tensor, near: float = 0.0) -> Result:
    """The value that a sum gave, beside the one that it must give."""
    return Result(name, torch.inf if found is None else (found - wanted).abs().max(), near)


def compile_all(made: "Symmetric", shard: Shard, dtype: torch.dtype, columns: int) -> None:
    """Make the kernels of `norms` and `parts`, and what memory they share, such that no test waits for a rank that compiles.

    Where Triton cannot compile apart from launching, they are launched, on every rank as often; what comes of it means nothing."""
    with precompiled():
        for _ in chain(norms(made, shard, dtype, columns), parts(made, shard, columns)):
            pass
    torch.cuda.synchronize()


def wrong_results(results: Iterator[Result]) -> str:
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


ONE_SHOT_BYTES = 256 << 10  # of two ranks, above which two-shot is faster (H200); the traffic grows with the ranks
BUFFER_BYTES = 64 << 20  # larger tensors go by NCCL
# of those, by ranks: up to which rows go as packets (kernels/allreduce_rmsnorm/op.py)
PACKET_ROWS = {2: 64, 4: 32, 8: 8}
ALIGNMENT = 16
SIZES = (2, 4, 8)  # of groups, that torch has a two-shot kernel for
DTYPES = (torch.bfloat16, torch.float32)  # that it sums
TEST_POLLS = 1 << 21  # a second: packets that never come are no reason to hang at start
FRESH_TURN = 1 << 16  # more than the self-tests at start take


class Symmetric(Distributed):
    """Collective: all ranks make it, and the same calls."""

    def __init__(
        self, shard: Shard, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, widest: tuple[int, int]
    ) -> None:
        """widest: tokens and columns of the largest tensor that is summed."""
        self._size, self._rank, self._group, self._name = shard.tp_size, shard.tp_rank, group, group.group_name
        super().__init__(shard, group)
        self.device = device
        self._one_shot_bytes = ONE_SHOT_BYTES * 2 // shard.tp_size
        count = min(widest[0] * widest[1], BUFFER_BYTES // dtype.itemsize)
        self._buffer, self._handle = self._shared(-(-count // 1024) * 1024, dtype)
        self._patience, self.fused = TEST_POLLS, True
        self._make_workspace(dtype, widest[1])
        self.one_row: OneRow | None = None
        if dtype == torch.bfloat16 and widest[1] % 2 == 0:
            self.one_row = OneRow(self.workspace, self._packets)
            self.one_row.patience = TEST_POLLS

    def _shared(self, count: int, dtype: torch.dtype) -> "tuple[Tensor, object]":
        """Memory that all ranks can reach, zeros, and its handle."""
        import torch.distributed._symmetric_memory as symm_mem

        tensor = symm_mem.empty(count, dtype=dtype, device=self.device)
        tensor.zero_()
        torch.cuda.synchronize()  # a peer may write as soon as all have met
        return tensor, symm_mem.rendezvous(tensor, self._name)

    def _addresses(self, handle: object) -> Tensor:
        return torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=self.device)  # type: ignore[attr-defined]

    def _packets(self, count: int) -> Tensor:
        memory, handle = self._shared(count, torch.int64)
        self._keep.append((memory, handle))
        return self._addresses(handle)

    def _make_workspace(self, dtype: torch.dtype, columns: int) -> None:
        rows, two_halves = FUSED_ROWS, 2 * self._size * FUSED_ROWS
        self._keep = [
            self._shared(two_halves * kernel.words(columns, dtype), torch.int64),
            self._shared(two_halves * columns, dtype),
            self._shared(self._size * rows, torch.int32),
        ]
        packets, inboxes, flags = (self._addresses(handle) for _, handle in self._keep)
        turns = torch.ones(rows, dtype=torch.int32, device=self.device)
        self.workspace = kernel.Workspace(
            self._rank, self._size, rows, columns, (packets, inboxes, flags), turns, PACKET_ROWS[self._size]
        )
        torch.cuda.synchronize()  # all is zero before this rank says so to the others

    def verified(self, *, fused: bool, one_row: bool) -> None:
        """From now on a peer may take as long as it needs. fused: allreduce_rmsnorm is right too. one_row: and that."""
        self._patience = FOR_EVER
        self.fused = fused
        if self.one_row is not None:
            self.one_row.patience = FOR_EVER
        if not one_row:
            self.one_row = None
            self.workspace.turns.fill_(FRESH_TURN)  # who gave up in the middle has counted other turns than the rest

    def _fits(self, x: Tensor) -> bool:
        return (
            x.dtype == self._buffer.dtype
            and x.numel() <= self._buffer.numel()
            and x.numel() * x.element_size() % (ALIGNMENT * self._size) == 0
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        if not self._fits(x):
            return super().all_reduce(x)
        x = x.contiguous()
        workspace = self._buffer[: x.numel()].view(x.shape)
        if x.numel() * x.element_size() <= self._one_shot_bytes:
            out = torch.empty_like(x)
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(workspace, x, "sum", self._name, out)
            return out
        workspace.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_out(workspace, "sum", self._name, x)
        return x

    def allreduce_rmsnorm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        workspace = self.workspace
        if (
            not self.fused
            or x.shape[0] > workspace.rows
            or x.shape[1] != workspace.columns
            or x.dtype != self._buffer.dtype
        ):
            return None
        return kernel.allreduce_rmsnorm(x, residual, weight, eps, workspace, self._patience)

    def gather(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor:
        rows, each = x.shape
        fit = self._buffer.numel() // each
        if x.dtype != self._buffer.dtype or not fit:
            return super().gather(x, width, out)
        whole = out if out is not None else torch.empty(rows, width, dtype=x.dtype, device=x.device)
        handle = self._handle
        for begin in range(0, rows, fit):
            part = x[begin : begin + fit]
            shape = list(part.shape)
            self._buffer[: part.numel()].view(shape).copy_(part)
            handle.barrier(channel=0)  # type: ignore[attr-defined]
            parts = [handle.get_buffer(rank, shape, x.dtype) for rank in range(self._size)]  # type: ignore[attr-defined]
            side_by_side(parts, width, whole[begin : begin + fit])
            handle.barrier(channel=0)  # type: ignore[attr-defined] # nobody overwrites what another still reads
        return whole


def make_symmetric(
    shard: Shard,
    group: dist.ProcessGroup,
    device: torch.device,
    dtype: torch.dtype,
    widest: tuple[int, int],
    plain: Distributed,
) -> Communicator:
    """Symmetric memory where all ranks of the group have it and its self-test is right, else NCCL. Collective."""
    if shard.tp_size not in SIZES or dtype not in DTYPES:
        return plain
    made, failure = None, ""
    try:
        made = Symmetric(shard, group, device, dtype, widest)
    except Exception as error:  # whatever the driver, the topology or torch says: NCCL works without
        failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if not all_say_yes(made is not None, group):
        warnings.warn(f"no symmetric memory between these GPUs, NCCL sums: {failure}", RuntimeWarning, stacklevel=2)
        return plain
    assert made is not None

    def is_right(results: Iterator[Result], otherwise: str) -> bool:
        wrong = _said(lambda: wrong_results(results))
        if right := all_say_yes(not wrong, group):
            return right
        warnings.warn(f"{otherwise}: {wrong}", RuntimeWarning, stacklevel=3)
        return False

    if not is_right(sums(made, plain, shard, dtype), "symmetric memory is wrong here, NCCL sums"):
        return plain
    if device.type == "cuda":
        failure = _said(lambda: compile_all(made, shard, dtype, widest[1]))
        all_say_yes(not failure, group)  # nobody waits for packets while a peer still compiles what sends them
    results = norms(made, shard, dtype, widest[1])
    fused = is_right(results, "kernels/allreduce_rmsnorm is wrong here, sums and norms are apart")
    results = parts(made, shard, widest[1])
    one_row = fused and is_right(results, "kernels/gemv sums nothing here, sums of one row are apart")
    made.verified(fused=fused, one_row=one_row)
    return made


def _said(check: Callable[[], str | None]) -> str:
    """The words of a check, or of the error that ended it."""
    try:
        return check() or ""
    except Exception as error:  # of a compiler or a driver: this rank votes no, and all go another way
        return in_one_line(error)


def all_say_yes(yes: bool, group: dist.ProcessGroup) -> bool:
    """Whether every rank says yes. The ranks ask over gloo, since the GPU may be what does not work."""
    votes = torch.tensor([int(yes)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return bool(votes.item())
