"""Memory that tensors have given back for a while, and take again: at sleep (--enable-sleep-mode). Used by the engine.

On a GPU the storages are freed, and all tensors that look into them stay: they look into the new storages afterwards. Those lie
elsewhere, so CUDA graphs, which hold addresses, must be captured anew. On a CPU addresses stay, since its kernels hold them: the
pages go back to the system, and come again, empty, as they are touched.
"""

import ctypes
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

MADV_DONTNEED = 4  # Linux


class Released:
    """The storages of `tensors`, each once. keep: what is in them comes again, from the host's memory; else zeros, or anything.

    What is kept and lies in the host's memory already stays where it is."""

    def __init__(self, tensors: Iterable[Tensor], *, keep: bool) -> None:
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        self._freed: list[tuple[UntypedStorage, int, Tensor | None]] = []
        for storage in storages.values():
            if storage.device.type != "cuda":
                if not keep:
                    _give_back_pages(storage)
            elif storage.resizable() and storage.nbytes():
                size = storage.nbytes()
                self._freed.append((storage, size, _on_host(_bytes_of(storage)) if keep else None))
                storage.resize_(0)

    @property
    def num_bytes(self) -> int:
        """Of the GPU's memory."""
        return sum(size for _, size, _ in self._freed)

    def restore(self) -> None:
        """The tensors have memory again. torch.OutOfMemoryError."""
        for storage, size, kept in self._freed:
            storage.resize_(size)
            if kept is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(kept)
                torch.cuda.synchronize(storage.device)
                torch.cuda.cudart().cudaHostUnregister(kept.data_ptr())
        self._freed.clear()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """uint8 [bytes], the storage itself."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _on_host(data: Tensor) -> Tensor:
    """A copy in pinned memory. torch's own pinned memory would be as large as the next power of two, and stay."""
    host = torch.empty(len(data), dtype=torch.uint8)
    torch.cuda.cudart().cudaHostRegister(host.data_ptr(), len(data), 0)
    return host.copy_(data)  # where it could not be pinned, that takes longer


def _give_back_pages(storage: UntypedStorage) -> None:
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED)
