"""What torch does not give of CUDA: copies from and to addresses of the host, memory of the host that is made known to the GPU, and a
GPU's memory that other processes of the host open. By the driver's own functions (CUDA driver API, "Memory Management").

Used by the mover thread, which moves KV pages (kv/device_pages.py). All functions raise DriverError where the driver refuses.
"""

import ctypes
from collections.abc import Callable
from ctypes import byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache

HANDLE_BYTES = 64
PORTABLE = 1  # of cuMemHostRegister: pinned for all contexts
LAZY_PEER_ACCESS = 1  # of cuIpcOpenMemHandle: the GPU whose memory it is may be another one


class DriverError(RuntimeError):
    """The line of a call that failed: "CUDA error: ..."."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", c_char * HANDLE_BYTES)]


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _keeping_lock() -> ctypes.PyDLL:
    """The same for what only hands work to the GPU: to give up Python's lock for a microsecond means to wait for it afterwards."""
    return ctypes.PyDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        name = c_char_p()
        _driver().cuGetErrorName(c_int(code), byref(name))
        raise DriverError(f"CUDA error: {what}: {(name.value or b'').decode() or code}")


@cache
def _context(device: int) -> c_void_p:
    number, context = c_int(), c_void_p()
    _check(_driver().cuDeviceGet(byref(number), c_int(device)), "cuDeviceGet")
    _check(_driver().cuDevicePrimaryCtxRetain(byref(context), number), "cuDevicePrimaryCtxRetain")
    return context


def use(device: int) -> None:
    """This thread calls for that GPU, in the context that torch has. A new thread has none, and torch gives it one late."""
    _check(_driver().cuCtxSetCurrent(_context(device)), "cuCtxSetCurrent")


def _copy(name: str, is_pinned: bool) -> Callable[..., int]:
    function: Callable[..., int] = getattr(_keeping_lock() if is_pinned else _driver(), name)
    return function


def to_device(device: int, host: int, num_bytes: int, stream: int, *, is_pinned: bool) -> None:
    """Copies from the host behind what is in the stream. What is not pinned is read before this returns."""
    copy = _copy("cuMemcpyHtoDAsync_v2", is_pinned)
    _check(copy(c_uint64(device), c_void_p(host), c_size_t(num_bytes), c_void_p(stream)), "a copy to the GPU")


def to_host(host: int, device: int, num_bytes: int, stream: int, *, is_pinned: bool) -> None:
    """Likewise to the host. What is not pinned is written before this returns."""
    copy = _copy("cuMemcpyDtoHAsync_v2", is_pinned)
    _check(copy(c_void_p(host), c_uint64(device), c_size_t(num_bytes), c_void_p(stream)), "a copy from the GPU")


def register(host: int, num_bytes: int) -> None:
    """Pins this memory of the host."""
    _check(_driver().cuMemHostRegister_v2(c_void_p(host), c_size_t(num_bytes), c_uint(PORTABLE)), "cuMemHostRegister")


def unregister(host: int) -> None:
    _check(_driver().cuMemHostUnregister(c_void_p(host)), "cuMemHostUnregister")


def export(address: int) -> tuple[bytes, int]:
    """The handle by which other processes open the allocation in which this address lies, and where it begins."""
    base, size, handle = c_uint64(), c_size_t(), _Handle()
    _check(_driver().cuMemGetAddressRange_v2(byref(base), byref(size), c_uint64(address)), "cuMemGetAddressRange")
    _check(_driver().cuIpcGetMemHandle(byref(handle), base), "cuIpcGetMemHandle")
    return bytes(handle), base.value


def open_exported(handle: bytes) -> int:
    """The address here of what another process has exported; of the same GPU, or one that this one reaches."""
    address, given = c_uint64(), _Handle.from_buffer_copy(handle)
    _check(_driver().cuIpcOpenMemHandle_v2(byref(address), given, c_uint(LAZY_PEER_ACCESS)), "cuIpcOpenMemHandle")
    return address.value


def close_exported(address: int) -> None:
    _check(_driver().cuIpcCloseMemHandle(c_uint64(address)), "cuIpcCloseMemHandle")
