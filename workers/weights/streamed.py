"""Weights that are read from object storage as they are needed: nothing is written to a disk. A part of sources.py.

A file is read in blocks, several at a time, some blocks ahead of the tensor that is asked for: storage answers one request slowly and
many fast. What lies before that tensor is forgotten. Short parts are read alone, unless their block is there.
"""

import json
import struct
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod

import torch
from torch import Tensor

from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.runtime.model_files.checkpoint_files import read_header
from meshlm.runtime.model_files.object_store import RemotePath
from meshlm.workers.weights.source import Source

BLOCK = 16 << 20
AHEAD = 16  # blocks that are asked for at a time
ALONE = 16  # what is shorter than this part of a block is read alone
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class _File:
    """The bytes of one file."""

    def __init__(self, file: RemotePath, pool: ThreadPoolExecutor) -> None:
        self.file, self._pool, self._size = file, pool, file.stat().st_size
        self._blocks: dict[int, Future[bytes]] = {}

    def read(self, begin: int, end: int) -> bytearray:
        """ProcessFatal where the storage does not give them."""
        first, last = begin // BLOCK, (end - 1) // BLOCK
        try:
            if end - begin < BLOCK // ALONE and not all(number in self._blocks for number in range(first, last + 1)):
                found = bytearray(self.file.read(begin, end))
            else:
                found = self._read(begin, end, first, last)
        except (OSError, ValueError) as error:
            raise ProcessFatal(f"{self.file}: cannot be read ({type(error).__name__}: {error})") from None
        if len(found) != end - begin:
            raise ProcessFatal(f"{self.file}: cannot be read, perhaps cut short ({len(found)} bytes of {end - begin})")
        return found

    def _read(self, begin: int, end: int, first: int, last: int) -> bytearray:
        for number in [number for number in self._blocks if number < first]:
            del self._blocks[number]
        found = bytearray()
        for number in range(first, last + 1):
            self._ask(number)
            block = memoryview(self._blocks[number].result())
            found += block[max(0, begin - number * BLOCK) : end - number * BLOCK]
            if number < last:
                del self._blocks[number]
        return found

    def _ask(self, number: int) -> None:
        """For this block, and for those behind it."""
        for ahead in range(number, number + AHEAD):
            begin = ahead * BLOCK
            if ahead not in self._blocks and begin < self._size:
                self._blocks[ahead] = self._pool.submit(self.file.read, begin, min(begin + BLOCK, self._size))


class _Streamed(Source):
    """One tensor."""

    def __init__(self, opened: _File, name: str, dtype: str, shape: tuple[int, ...], begin: int) -> None:
        self._opened, self.dtype, self.shape, self._begin = opened, dtype, shape, begin
        if dtype not in _DTYPES:
            raise ProcessFatal(f"{opened.file}: tensor {name} is of type {dtype}, which cannot be read")

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        if dim:
            return self.whole().narrow(dim, begin, end - begin)
        return self._rows(begin, end, (end - begin, *self.shape[1:]))

    def whole(self) -> Tensor:
        return self._rows(0, self.shape[0] if self.shape else 1, self.shape)

    def _rows(self, begin: int, end: int, shape: tuple[int, ...]) -> Tensor:
        dtype = _DTYPES[self.dtype]
        row = prod(self.shape[1:]) * dtype.itemsize
        if begin == end or not row:
            return torch.empty(shape, dtype=dtype)
        found = self._opened.read(self._begin + begin * row, self._begin + end * row)
        return torch.frombuffer(found, dtype=torch.uint8).view(dtype).view(shape)


def streamed(files: tuple[RemotePath, ...]) -> Iterator[tuple[str, Source]]:
    """The tensors of safetensors files, file by file, as they lie in them. ProcessFatal."""
    with ThreadPoolExecutor(AHEAD, "weights") as pool:
        for file in files:
            opened, (begin, places) = _File(file, pool), _places(file)
            for name, (dtype, shape, at) in sorted(places.items(), key=lambda pair: pair[1][2]):
                yield name, _Streamed(opened, name, dtype, shape, begin + at)


def _places(file: RemotePath) -> tuple[int, dict[str, tuple[str, tuple[int, ...], int]]]:
    """Where the tensors' bytes begin; by name the dtype, the shape, and where a tensor begins among them."""
    try:
        headers = read_header(file)
        (length,) = struct.unpack("<Q", file.read(0, 8))
        said = json.loads(file.read(8, 8 + length))
    except (ModelFilesError, OSError, ValueError) as error:
        raise ProcessFatal(f"{file}: {error}") from None
    found = {name: (header.dtype, header.shape, int(said[name]["data_offsets"][0])) for name, header in headers.items()}
    return 8 + length, found
