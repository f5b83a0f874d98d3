"""Tensors that were received, as a safetensors file in the host's memory. Written by the first worker of the mesh.

The room is taken before the first byte comes, so that memory that is too small is an error and not the end of the process. The times of
all files are a function of the folder's name, so its digest (runtime/model_files/digest.py) is that of this update alone.
"""

import hashlib
import json
import mmap
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from meshlm.protocol.weight_transfer import ITEM_BYTES, OF_FILES, TensorInfo
from meshlm.runtime.model_files import received
from meshlm.workers.weights.transfer.source import TransferFailed

DESCRIPTIONS = (".json", ".txt", ".model", ".jinja", ".tiktoken")
MAX_DESCRIPTION = 256 << 20
SPARE = 256 << 20  # bytes of the host's memory that are left to others


class KeptFile:
    """File `number` of the folder of an update, of these tensors. TransferFailed where the host has no room for it."""

    def __init__(self, folder: Path, number: int, tensors: tuple[TensorInfo, ...], model_path: str) -> None:
        self._folder, self._path = folder, folder / f"received-{number:05}.safetensors"
        header, self._places = _header(tensors)
        total = len(header) + sum(tensor.num_bytes for tensor in tensors)
        _check_room(total)
        try:
            received.make_private(folder)
            if number == 0:
                _copy_descriptions(Path(model_path), folder)
            opened = os.open(f"{self._path}.part", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(opened, 0, total)
                self._map = mmap.mmap(opened, total)
            finally:
                os.close(opened)
        except OSError as error:
            Path(f"{self._path}.part").unlink(missing_ok=True)  # what was allocated of it is given back
            raise TransferFailed(f"{self._path}: {error.strerror}: {total:,} bytes are needed in memory") from None
        self._map[: len(header)] = header
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def take(self, tensors: list[TensorInfo], data: Tensor) -> None:
        """The bytes of these tensors, one after the other: [num_bytes] uint8 of any device."""
        at = 0
        for tensor in tensors:
            begin, size = self._places[tensor.name], tensor.num_bytes
            self._bytes[begin : begin + size].copy_(data[at : at + size])
            at += size

    def finish(self) -> None:
        """It is whole: readers see it from now on."""
        del self._bytes, self._map
        os.replace(f"{self._path}.part", self._path)
        set_times(self._folder)


def set_times(folder: Path) -> None:
    """Those of all files are a function of the folder's name."""
    time = int.from_bytes(hashlib.sha256(str(folder).encode()).digest()[:7])
    for file in folder.iterdir():
        os.utime(file, ns=(time, time))


def _header(tensors: tuple[TensorInfo, ...]) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, and where in the file each tensor begins: those of wide numbers first, as the format has it."""
    entries: dict[str, dict[str, object]] = {}
    at = 0
    for tensor in sorted(tensors, key=lambda one: -ITEM_BYTES[one.dtype]):
        offsets = [at, at := at + tensor.num_bytes]
        entries[tensor.name] = {"dtype": OF_FILES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()}  # type: ignore[index]


def _check_room(num_bytes: int) -> None:
    """Memory that is promised and not there would end some process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    left = int(fields["MemAvailable"].split()[0]) * 1024 - SPARE
    free = shutil.disk_usage(received.MEMORY).free
    if num_bytes > min(left, free):
        where = f"{received.MEMORY} has {free:,} bytes left" if free < left else f"this host has {max(0, left):,} left"
        raise TransferFailed(f"{num_bytes:,} bytes of memory are needed for the weights that are sent; {where}")


def _copy_descriptions(model: Path, folder: Path) -> None:
    """What a model's folder has beside its weights."""
    if not model.is_dir():
        raise TransferFailed(f"{model}: the weights of the start are one file; tensors are sent to models of a folder")
    for file in model.iterdir():
        fits = file.suffix in DESCRIPTIONS and not file.name.endswith(".index.json")
        if fits and file.is_file() and file.stat().st_size <= MAX_DESCRIPTION:
            shutil.copyfile(file, folder / file.name)
