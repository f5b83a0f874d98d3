"""Weights in memory of the same host that a trainer has written: files below /dev/shm (`buckets`), or a GPU's memory by CUDA's handles.

Files are read, never mapped: one that a trainer cuts short is an error, and not the end of this process.
"""

import os
import stat
from collections.abc import Iterator

import torch
from torch import Tensor

from meshlm.protocol.weight_transfer import Bucket, TensorInfo, UpdateInfo
from meshlm.runtime.model_files import received
from meshlm.workers.weights.transfer import cuda_handles
from meshlm.workers.weights.transfer.source import TransferFailed


class HostMemory:
    """`device`: of this worker, for handles."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_over = device, False

    def receive(self, info: UpdateInfo, tensors: tuple[TensorInfo, ...]) -> Iterator[tuple[list[TensorInfo], Tensor]]:
        if info.ipc_handles_pickled is not None:
            yield from cuda_handles.receive(info.ipc_handles_pickled, tensors, self._device)
            return
        at = 0
        for bucket in info.buckets or ():
            own = list(tensors[at : (at := at + bucket.count)])
            if self._is_over:
                raise TransferFailed("the weight update was ended")
            yield own, _read(bucket, sum(tensor.num_bytes for tensor in own))

    def has_trainer(self) -> bool:
        """Nobody is joined for it."""
        return False

    def abort(self) -> None:
        self._is_over = True


def _read(bucket: Bucket, num_bytes: int) -> Tensor:
    """[num_bytes] uint8: what the file begins with."""
    path, where = received.MEMORY / bucket.name, f"update_info.buckets: {bucket.name}"
    into = memoryview(bytearray(num_bytes))
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise TransferFailed(f"{where}: it is no file")
            at = 0
            while at < num_bytes and (count := os.preadv(opened, [into[at:]], at)):
                at += count
        finally:
            os.close(opened)
    except OSError as error:
        raise TransferFailed(f"{where}: {error.strerror} (in {received.MEMORY})") from None
    if at < num_bytes:
        raise TransferFailed(f"{where}: it has {at:,} bytes, and its tensors have {num_bytes:,}")
    return torch.frombuffer(into, dtype=torch.uint8) if num_bytes else torch.empty(0, dtype=torch.uint8)
