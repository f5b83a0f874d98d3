"""Puts an engine to sleep and wakes it up: its weights and KV cache without the device's memory (--enable-sleep-mode).

Owned by the engine; called by the stepper thread between two sessions, by all workers of a group in the same one.
"""

import ctypes
import mmap
from collections.abc import Iterable
from typing import TYPE_CHECKING

import structlog
import torch
from torch import Tensor, UntypedStorage

from meshlm.protocol.sleeping import TAGS, WEIGHTS
from meshlm.workers.weights.host_copy import on_host
from meshlm.workers.weights.reload import tensors_of

if TYPE_CHECKING:
    from meshlm.workers.engine.engine import ModelEngine


MADV_DONTNEED, MADV_REMOVE = 4, 9  # Linux


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
                self._freed.append((storage, size, on_host(_bytes_of(storage)) if keep else None))
                storage.resize_(0)

    @property
    def num_bytes(self) -> int:
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


def _give_back_pages(storage: UntypedStorage) -> None:
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        libc = ctypes.CDLL(None, use_errno=True)
        what = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
        if libc.madvise(*what, MADV_REMOVE):  # it is no memory that others may map, too
            libc.madvise(*what, MADV_DONTNEED)


_log = structlog.get_logger()


class Sleeper:
    """`without`: what sleeps now."""

    def __init__(self, engine: "ModelEngine") -> None:
        self._engine = engine
        self._released: dict[str, Released] = {}

    def be_without(self, tags: tuple[str, ...]) -> None:
        """The memory of these tags is given back, that of all others is there. CUDA graphs are captured anew once all is.
        torch.OutOfMemoryError where others have taken the memory meanwhile."""
        engine, before = self._engine, set(self._released)
        if before == set(tags):
            return
        cuda = engine.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(engine.device)
        if tags:
            engine.extras.sleep(awake=False)
        if not before:
            engine.graphs.forget()  # they hold addresses
            if engine.verification is not None:
                engine.verification.forget_graphs()
        with torch.inference_mode():
            for tag in TAGS:
                if tag in before and tag not in tags:
                    self._released.pop(tag).restore()
                elif tag in tags and tag not in before:
                    of_caches = (tensor for cache in engine.compute.caches for tensor in cache.tensors())
                    of_weights = [tensor for model in engine.models for tensor in tensors_of(model)]
                    of_weights += engine.extras.weights()
                    tensors = of_weights if tag == WEIGHTS else of_caches
                    self._released[tag] = Released(tensors, keep=tag == WEIGHTS)
        if cuda:
            torch.cuda.empty_cache()
        freed = {tag: f"{one.num_bytes / 2**30:.2f} GiB" for tag, one in self._released.items()}
        _log.info("asleep" if freed else "awake", **freed)
        if not self._released:
            engine.capture_again()
            engine.extras.sleep(awake=True)
