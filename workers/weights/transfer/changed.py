"""Weights of which a trainer sends some numbers alone: the mesh's own, with those numbers in their places.

The first worker copies the mesh's weights into the folder of the update, as if the trainer had sent them all, and changes what comes.
The copy is of files whose digest is that of the mesh's version, so the numbers between are those that the trainer knows.
"""

import math
import mmap
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from meshlm.protocol.weight_transfer import OF_FILES, TensorInfo
from meshlm.protocol.weights import WeightsVersion
from meshlm.runtime.errors import ModelFilesError
from meshlm.runtime.model_files.checkpoint_files import TensorHeader, read_header, weight_files
from meshlm.runtime.model_files.digest import digest_of
from meshlm.workers.weights.transfer.kept import KeptFile, set_times
from meshlm.workers.weights.transfer.source import TransferFailed

TYPES = {name: kind for kind, name in OF_FILES.items()}


class ChangedFile:
    """File 0 of the folder of an update. TransferFailed where the mesh's weights cannot be copied."""

    def __init__(self, folder: Path, number: int, base: WeightsVersion, model_path: str) -> None:
        """number: of the trainer's calls before, which have made the file."""
        self._folder, path = folder, folder / "received-00000.safetensors"
        if not number:
            _copy(base, folder, model_path)
        try:
            self._headers = read_header(path)
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        except (ModelFilesError, OSError) as error:
            raise TransferFailed(f"{path}: {error}") from None
        self._begins = _begins(self._headers, int.from_bytes(self._map[:8], "little") + 8)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def change(self, tensor: TensorInfo, places: Tensor, values: Tensor) -> None:
        """places int32 [m] of the flat tensor, values [m], of any device. TransferFailed: the mesh has no such tensor, or place."""
        header = self._headers.get(tensor.name)
        if header is None:
            raise TransferFailed(f"update_info.names: the mesh's weights have no {tensor.name}")
        if header.shape != tensor.shape:
            raise TransferFailed(f"update_info.shapes: {tensor.name} is {header.shape}, not {tensor.shape}")
        dtype, size = getattr(torch, TYPES[header.dtype]), math.prod(header.shape)
        if not (values.dtype == dtype or (values.dtype.is_floating_point and dtype.is_floating_point)):
            raise TransferFailed(f"update_info.dtype_names: {tensor.name} is {TYPES[header.dtype]}, not {tensor.dtype}")
        where = places.cpu().long()
        if len(where) and not 0 <= int(where.min()) <= int(where.max()) < size:
            raise TransferFailed(f"a place of {tensor.name} is none of its {size:,} numbers")
        begin = self._begins[tensor.name]
        self._bytes[begin : begin + size * dtype.itemsize].view(dtype).index_copy_(0, where, values.cpu().to(dtype))

    def finish(self) -> None:
        del self._bytes, self._map
        set_times(self._folder)


def _begins(headers: dict[str, TensorHeader], first: int) -> dict[str, int]:
    """Where each tensor of a file that KeptFile wrote begins: they follow one another as its header has them."""
    found, at = dict[str, int](), first
    for name, header in headers.items():
        found[name] = at
        at += math.prod(header.shape) * getattr(torch, TYPES[header.dtype]).itemsize
    return found


def _copy(base: WeightsVersion, folder: Path, model_path: str) -> None:
    source = base.source if base.number else base.source or model_path
    if not source:
        raise TransferFailed(
            "the mesh's weights are in its workers' memory alone, so no change can be made to them; send all tensors"
        )
    try:
        if base.digest and digest_of(source) != base.digest:
            raise TransferFailed(f"{source}: the files are others than when the mesh read them; send all tensors")
        found = weight_files(Path(source), "safetensors")
        headers = [(file, read_header(file)) for file in found.files]
        known = {name: header for _, own in headers for name, header in own.items()}
        if odd := next((name for name, header in known.items() if header.dtype not in TYPES), ""):
            raise TransferFailed(
                f"{source}: {odd} is {known[odd].dtype}, of which nothing can be changed; send all tensors"
            )
        tensors = [TensorInfo(name, TYPES[header.dtype], header.shape) for name, header in known.items()]
        kept = KeptFile(folder, 0, tuple(tensors), model_path)
        for file, own in headers:
            with safe_open(str(file), "pt") as opened:
                for name in own:
                    kept.take(
                        [TensorInfo(name, TYPES[own[name].dtype], own[name].shape)], _flat(opened.get_tensor(name))
                    )
        kept.finish()
    except (ModelFilesError, OSError) as error:
        raise TransferFailed(f"{source}: {error}; send all tensors") from None


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
