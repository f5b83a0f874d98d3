"""The group of a trainer and all workers, in which the trainer, rank 0, broadcasts weights: how they meet, and gloo's.

They meet as vLLM's StatelessProcessGroup does: the trainer serves a TCPStore at `master_address`:`master_port`, whose clients are the
workers, each with the number of its rank. Over gloo all of them then make a process group with the store's keys below "gloo"; over NCCL
the store has the group's id (nccl.py).
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from meshlm.protocol.weight_transfer import BUFFER_BYTES, JoinInfo, TensorInfo, UpdateInfo, packed
from meshlm.workers.weights.transfer.source import TransferFailed

MEET = timedelta(seconds=60)  # that the trainer and all workers have to be there
MEET_GLOO = timedelta(seconds=30)
SEND = timedelta(minutes=30)  # of one broadcast: how long a trainer may compute before it
LOOK_STORE_S = 1.0  # how often it sees whether the trainer's process is there
LISTENS_S = 0.1  # how often a worker sees whether the trainer listens already
LOOK_S = 0.001  # how often a thread that waits for the trainer sees whether it is to end
PREFIX = "gloo"
NOT_WANTED = "another call of a trainer followed"
_Gloo: Any = torch.distributed.ProcessGroupGloo  # its types are not told
_kept: list[Any] = []
"""Groups that were aborted, kept until the process ends. The destructor of one waits for a broadcast that the trainer never sends, and
holds Python's lock meanwhile: no thread of the worker would run."""


class TrainerGroup(Protocol):
    """The ranks that receive what rank 0 broadcasts."""

    device: torch.device

    def broadcast(self, data: Tensor) -> None:
        """Fills it with what rank 0 sends: any shape, on `device`. TransferFailed."""
        ...

    def has_trainer(self) -> bool:
        """Whether rank 0's process is there."""
        ...

    def abort(self) -> None:
        """From any thread: the others' broadcasts fail, and so does ours."""
        ...


def meet(info: JoinInfo, is_wanted: Callable[[], bool]) -> TCPStore:
    """The trainer's store, once all ranks are there. TransferFailed, also where nobody wants that any more: a trainer that comes later
    may serve its store at the same address."""
    assert info.master_address is not None
    assert info.master_port is not None
    where = f"{info.master_address}:{info.master_port}"
    _wait_for((info.master_address, info.master_port), is_wanted)
    try:
        store = TCPStore(info.master_address, info.master_port, info.world_size, False, MEET, use_libuv=False)
    except (RuntimeError, ValueError, TypeError) as error:
        raise TransferFailed(
            f"the trainer at {where} and all {info.world_size} ranks did not meet: {_line(error)}"
        ) from None
    if not is_wanted():
        raise TransferFailed(NOT_WANTED)
    return store


def _wait_for(address: tuple[str, int], is_wanted: Callable[[], bool]) -> None:
    """Until somebody listens there, at most as long as ranks have to meet."""
    until = time.monotonic() + MEET.total_seconds()
    while is_wanted():
        try:
            socket.create_connection(address, timeout=LOOK_STORE_S).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise TransferFailed(f"the trainer at {address[0]}:{address[1]} is not there: {error}") from None
            time.sleep(LISTENS_S)
    raise TransferFailed(NOT_WANTED)


def has_store(store: TCPStore, key: str) -> bool:
    """Whether the process that serves the store is there."""
    try:
        store.check([key])
    except RuntimeError:
        return False
    return True


class GlooGroup:
    """Over TCP, between CPUs."""

    def __init__(self, info: JoinInfo, rank: int, is_wanted: Callable[[], bool]) -> None:
        """TransferFailed where the ranks do not meet, or nobody wants that any more."""
        self.device = torch.device("cpu")
        self._aborted = threading.Event()
        store = meet(info, is_wanted)
        assert info.master_address is not None
        assert info.master_port is not None
        assert info.world_size is not None
        options = _Gloo._Options()
        address = _own_address(info.master_address, info.master_port)
        options._devices = [_Gloo.create_device(hostname=address)]
        options._timeout = MEET_GLOO
        try:
            self._group = _Gloo(PrefixStore(PREFIX, store), rank, info.world_size, options)
        except RuntimeError as error:
            raise TransferFailed(f"the ranks of the trainer's group did not meet: {_line(error)}") from None
        self._group._set_default_timeout(SEND)
        self._store = store

    def broadcast(self, data: Tensor) -> None:
        try:
            work, waited_s = self._group.broadcast([data], _from_trainer()), 0.0
            while not work.is_completed():
                if self._aborted.wait(LOOK_S):
                    raise TransferFailed("the weight update was ended")
                waited_s += LOOK_S
                if waited_s >= LOOK_STORE_S:  # a connection that was closed before we wait on it may not say so
                    waited_s = 0.0
                    self._store.check([PREFIX])
            work.wait()
        except RuntimeError as error:
            text = "the weight update was ended" if self._aborted.is_set() else f"the broadcast failed: {_line(error)}"
            raise TransferFailed(text) from None

    def has_trainer(self) -> bool:
        return has_store(self._store, PREFIX)

    def abort(self) -> None:
        self._aborted.set()
        _kept.append(self._group)
        self._group.abort()


class Broadcasts:
    """A source (source.py): what the trainer of a group broadcasts."""

    def __init__(self, group: TrainerGroup, info: JoinInfo) -> None:
        self._group, self._info = group, info

    def receive(self, info: UpdateInfo, tensors: tuple[TensorInfo, ...]) -> Iterator[tuple[list[TensorInfo], Tensor]]:
        is_packed = self._info.packed if info.packed is None else info.packed
        most = info.packed_buffer_size_bytes or self._info.packed_buffer_size_bytes or BUFFER_BYTES
        for own in packed(tensors, most) if is_packed else [[tensor] for tensor in tensors]:
            data = torch.empty(sum(one.num_bytes for one in own), dtype=torch.uint8, device=self._group.device)
            # one by one they have their own type
            self._group.broadcast(data if is_packed else data.view(getattr(torch, own[0].dtype)))
            yield own, data

    def receive_changes(
        self, tensors: tuple[TensorInfo, ...], counts: list[int]
    ) -> Iterator[tuple[TensorInfo, Tensor, Tensor]]:
        """Of each tensor so many places, int32 [count] of the flat tensor, and the numbers [count] that are there now."""
        for tensor, count in zip(tensors, counts, strict=True):
            places = torch.empty(count, dtype=torch.int32, device=self._group.device)
            values = torch.empty(count, dtype=getattr(torch, tensor.dtype), device=self._group.device)
            for data in (places, values) if count else ():
                self._group.broadcast(data)
            yield tensor, places, values

    def has_trainer(self) -> bool:
        return self._group.has_trainer()

    def abort(self) -> None:
        self._group.abort()


def _from_trainer() -> "torch.distributed.BroadcastOptions":
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return options


def _own_address(host: str, port: int) -> str:
    """The address of this host by which it reaches the trainer's."""
    with socket.create_connection((host, port), timeout=MEET.total_seconds()) as connection:
        address: str = connection.getsockname()[0]
        return address


def _line(error: Exception) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
