"""The trainer's group over NCCL, met as vLLM's PyNcclCommunicator does: rank 0 puts the id of the group into the store as a pickle of a
ctypes structure, which is read and not run; all ranks make a communicator of it, and sum one number to find out that it works.

NCCL is torch's library, called by ctypes: torch's own process groups exchange the id in a way of theirs.
"""

import ctypes
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshlm.protocol.weight_transfer import JoinInfo
from meshlm.runtime.plain_pickle import Called, Named, NotPlain, read
from meshlm.workers.weights.transfer.groups import LOOK_S, has_store, meet
from meshlm.workers.weights.transfer.source import TransferFailed

KEY = "broadcast_from/0/0"  # of the first object that rank 0 broadcasts over the store
ID_BYTES = 128
LOOK_STORE_S = 1.0  # how often a rank that waits sees whether the trainer's process is there
DTYPES = {
    torch.int8: 0, torch.uint8: 1, torch.bool: 1, torch.int32: 2, torch.int64: 4, torch.float16: 6, torch.float32: 7,
    torch.float64: 8, torch.bfloat16: 9, torch.float8_e4m3fn: 1, torch.float8_e5m2: 1, torch.int16: 6,
}  # fmt: skip
"""ncclDataType_t: what it broadcasts it does not look into, so any type of as many bytes does."""
FLOAT32, SUM = 7, 0


class _Id(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


def id_of(pickle: bytes) -> bytes:
    """The 128 bytes of ncclUniqueId. TransferFailed where the bytes are anything but a pickle of that."""
    try:
        found = read(pickle)
    except NotPlain as error:
        raise TransferFailed(f"the trainer's id of the NCCL group: {error}") from None
    match found:
        case Called(Named("_ctypes", "_unpickle"), (Named(_, "ncclUniqueId"), ({}, bytes() as told))) if (
            len(told) == ID_BYTES
        ):
            return told
    raise TransferFailed("the trainer's id of the NCCL group is not a pickle of ncclUniqueId")


@cache
def _library() -> Any:
    """TransferFailed where torch has none."""
    try:
        library = ctypes.CDLL("libnccl.so.2")  # torch has loaded it
    except OSError as error:
        raise TransferFailed(f"NCCL cannot be had: {error}") from None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), ctypes.c_int, _Id, ctypes.c_int]
    library.ncclAllReduce.argtypes = [pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer]
    library.ncclCommGetAsyncError.argtypes = [pointer, ctypes.POINTER(ctypes.c_int)]
    library.ncclCommAbort.argtypes = [pointer]
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    if code := getattr(library, name)(*arguments):
        raise TransferFailed(f"{name}: {library.ncclGetErrorString(code).decode()}")


class NcclGroup:
    """`device`: this worker's. Everything but `abort` is called by one thread."""

    def __init__(self, info: JoinInfo, rank: int, device: torch.device, is_wanted: Callable[[], bool]) -> None:
        """TransferFailed where the ranks do not meet, or nobody wants that any more."""
        self.device = device
        self._aborted, self._lock = threading.Event(), threading.Lock()
        self._comm: ctypes.c_void_p | None = None
        self._store = meet(info, is_wanted)
        try:
            told = self._store.get(KEY)
        except RuntimeError as error:
            raise TransferFailed(f"the trainer gave no id of an NCCL group: {str(error).splitlines()[0]}") from None
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)
        comm = ctypes.c_void_p()
        _call("ncclCommInitRank", ctypes.byref(comm), info.world_size, _Id.from_buffer_copy(id_of(told)), rank)
        self._comm = comm
        self._run("ncclAllReduce", torch.zeros(1, device=device), FLOAT32, SUM)

    def broadcast(self, data: Tensor) -> None:
        self._run("ncclBroadcast", data, DTYPES[data.dtype], 0)

    def _run(self, name: str, data: Tensor, dtype: int, argument: int) -> None:
        """In place, and done when it returns."""
        torch.cuda.set_device(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))  # that made `data`
        with self._lock:
            if self._comm is None:
                raise TransferFailed("the weight update was ended")
            address = data.data_ptr()
            _call(name, address, address, data.numel(), dtype, argument, self._comm, self._stream.cuda_stream)
        done = torch.cuda.Event()
        done.record(self._stream)
        waited_s = 0.0
        while not done.query():
            if self._aborted.wait(LOOK_S):
                raise TransferFailed("the weight update was ended")
            waited_s += LOOK_S
            if waited_s >= LOOK_STORE_S:
                waited_s = 0.0
                self._look()

    def _look(self) -> None:
        """TransferFailed where another rank is gone."""
        code = ctypes.c_int()
        with self._lock:
            if self._comm is not None:
                _call("ncclCommGetAsyncError", self._comm, ctypes.byref(code))
        if code.value:
            raise TransferFailed(f"NCCL: {_library().ncclGetErrorString(code.value).decode()}")
        if not self.has_trainer():
            raise TransferFailed("the trainer is gone")

    def has_trainer(self) -> bool:
        return has_store(self._store, KEY)

    def abort(self) -> None:
        self._aborted.set()
        with self._lock:
            comm, self._comm = self._comm, None
            if comm is not None:
                _library().ncclCommAbort(comm)
