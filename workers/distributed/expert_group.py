"""The ranks that share experts: how a worker's layers send tokens to the experts of others, and their results back.

A worker has one such group for all its layers and as long as it lives; what connects it to the others is made anew in each epoch of the
ranks that step together (`connect`) and given up when one of them is lost (`close`). Members are the data-parallel ranks' workers of
one tensor-parallel rank, which have a part of the experts each; the sum over the tensor-parallel ranks is their stage's own affair.

Used by the stepper thread. All members make the same calls in the same order, with tensors of the same shapes: those of `num_tokens`,
on which they have agreed. While it is not connected (dummy steps at the start) what this rank sends stands for what all send.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore

from meshlm.protocol.model import ModelSpec
from meshlm.protocol.wire.ids import Epoch
from meshlm.workers.distributed.communicator import set_environment
from meshlm.workers.distributed.lockstep import StepAborted
from meshlm.workers.distributed.membership import POLL_S, MeetingSpot

if TYPE_CHECKING:
    from meshlm.workers.distributed.peer_rooms import PeerRooms

T = TypeVar("T")
MEET = timedelta(seconds=20)  # all members have said that they are here before any waits for another
TIMEOUT = timedelta(minutes=10)  # of one collective; a member that is gone is noticed at once, when its sockets close


class ExpertGroup:
    """`rank` of `size` members; `name` tells apart groups of one epoch."""

    def __init__(
        self, rank: int, size: int, name: str, device: torch.device, spot: "MeetingSpot | None" = None
    ) -> None:
        """spot: where members on several hosts meet; None: all are on this one."""
        self._spot = spot
        self.rank, self.size, self.device = rank, size, device
        self.num_tokens = 0  # of the step: as many as the member with the most has
        self._name = name
        self.rooms: PeerRooms | None = None  # where members write into one another's memory
        self._group: Any = None  # torch's
        self.pause: Callable[[], None] | None = None  # while what is sent travels; None: nobody else computes meanwhile
        self._stream: Any = None  # of its collectives, on a GPU

    def share_memory(self, most_tokens: int, spec: ModelSpec, dtype: torch.dtype) -> None:
        """Before anything is connected: have memory that members write into, for steps of so many tokens of each. ProcessFatal."""
        from meshlm.workers.distributed.peer_rooms import PeerRooms, check_peers

        assert spec.moe is not None
        if self.device.type == "cuda":
            check_peers(self.device)
        shape = (most_tokens, spec.hidden_size, spec.moe.num_experts_per_tok)
        self.rooms = PeerRooms(self.rank, self.size, *shape, dtype, self.device)

    def connect(self, folder: str, epoch: Epoch) -> None:
        """Meet the other members, who do so at the same time. StepAborted."""
        self.close()
        self.num_tokens = 0
        if self.size == 1:
            return
        set_environment(None if self._spot is None else self._spot.interface)
        store = self._store(folder, f"experts-{epoch}-{self._name}")
        store.set_timeout(MEET)
        self._say(lambda: self._make(store))
        if self.rooms is not None:
            rooms, name = self.rooms, f"experts-{epoch}-{self._name}"
            self._say(lambda: rooms.meet(name, PrefixStore("rooms", store), self._group))
            self._meet()
            rooms.self_test()

    def _store(self, folder: str, name: str) -> Any:
        """The members' own store of an epoch. StepAborted."""
        if self._spot is None:
            return FileStore(f"{folder}/{name}.store", self.size)
        until = time.monotonic() + MEET.total_seconds()
        while (store := self._spot.open()) is None:
            if time.monotonic() > until:
                raise StepAborted("the ranks that share experts have not met: their store is not there")
            time.sleep(POLL_S)
        return PrefixStore(name, store)

    def _make(self, store: Any) -> None:
        if self.device.type == "cpu":
            self._group = torch.distributed.ProcessGroupGloo(store, self.rank, self.size, MEET)
            self._group._set_default_timeout(TIMEOUT)
            return
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        self._group = torch.distributed.ProcessGroupNCCL(store, self.rank, self.size, options)
        self._meet()  # it connects when it is first used

    def _meet(self) -> None:
        self._say(lambda: self._group.allreduce([torch.zeros(1, device=self.device)]).wait())
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        self.abort()
        self._group = None

    def abort(self) -> None:
        """End what waits for other members on the device; called in any thread, and waits for nothing itself.

        NCCL ends what waits at once, and then does not return as long as there are CUDA graphs with its communicator, which the stepper
        has until it meets the next group. So a thread of its own sees to it."""
        if self.rooms is not None:
            self.rooms.leave()
        group = self._group
        if group is not None and self.device.type == "cuda":
            threading.Thread(target=group.abort, name="abort", daemon=True).start()

    def _say(self, call: Callable[[], object]) -> None:
        """A collective. StepAborted when a member is gone; then so is this one, since others may wait for it."""
        try:
            call()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what torch's backends and stores raise when a connection ends
            self.close()
            raise StepAborted(
                f"the ranks that share experts lost one: {next(iter(str(error).splitlines()), '')}"
            ) from None

    def start(self, work: Callable[[], T], *, beside: bool = True) -> Callable[[], T]:
        """Begin to send; what is given waits for the result, after it has paused. On a GPU it runs in a stream of its own, beside
        what is launched until then; on a CPU, and where it should not run beside, it is done at once."""
        found = self._begin(work, beside=beside)

        def received() -> T:
            if self.pause is not None:
                self.pause()
            return found()

        return received

    def _begin(self, work: Callable[[], T], *, beside: bool) -> Callable[[], T]:
        """Nothing that `work` makes is used by both streams at once, so memory may be given back without asking them."""
        if self.device.type == "cpu" or not beside:
            result = work()
            return lambda: result
        make: Any = torch.cuda.Stream  # typed in some versions of torch only
        self._stream = self._stream or make(priority=-1)
        compute = torch.cuda.current_stream()
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            found = work()
            done = self._stream.record_event()

        def received(keep: object = work) -> T:
            """`work` is kept until here: what it reads is the compute stream's, which could give its memory away."""
            torch.cuda.current_stream().wait_event(done)
            return found

        return received

    def all_gather(self, x: Tensor) -> Tensor:
        """[m, ...] of each member -> [size m, ...], in the order of ranks."""
        out = torch.empty(self.size * x.shape[0], *x.shape[1:], dtype=x.dtype, device=x.device)
        if self._group is None:
            out.view(self.size, *x.shape)[:] = x
        else:
            self._say(lambda: self._group._allgather_base(out, x.contiguous()).wait())
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[size m, ...] of each member -> [m, ...]: the sum over members of what they have for this rank."""
        out = torch.empty(x.shape[0] // self.size, *x.shape[1:], dtype=x.dtype, device=x.device)
        if self._group is None:
            out.copy_(x[: len(out)])
        else:
            self._say(lambda: self._group._reduce_scatter_base(out, x.contiguous()).wait())
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        """[size m, ...]: m for each member -> the same, m from each."""
        if self._group is None:
            return x
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._say(lambda: self._group.alltoall_base(out, x.contiguous(), [], []).wait())
        return out

    def exchange(self, x: Tensor, sends: list[int], takes: list[int]) -> Tensor:
        """[sum of sends, n]: rows for each member -> [sum of takes, n], rows from each. Connected."""
        out = torch.empty(sum(takes), *x.shape[1:], dtype=x.dtype, device=x.device)
        self._say(lambda: self._group.alltoall_base(out, x.contiguous(), takes, sends).wait())
        return out
