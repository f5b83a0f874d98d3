"""The tensors of a .gguf file, which may be quantised: decoded as float32, or their rows as they are. A part of sources.py.

Parts are cut out before anything is decoded where the quantisation's blocks allow it: rows always, columns at the borders of blocks.
"""

import math
import re
from collections.abc import Iterator
from copy import copy
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshlm.architectures.family import Family, Weight
from meshlm.architectures.registry import family_of, weights_of
from meshlm.kernels.cpu.packed import Rows
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.gguf_files import GGUFError, GGUFTensor, files_of, read_header

_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # by ggml's numbers of types
_OF_LAYER = re.compile(r"(?P<layer>blk\.\d+)\.(?P<stem>[\w.]+)\.(?P<kind>weight|bias)")
_NEEDLESS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")  # computed here, or read with the shape


_HALVES = {
    2: (0,),
    3: (0, 2),
    6: (0,),
    7: (0, 2),
    8: (0,),
    10: (80, 82),
    11: (108,),
    12: (0, 2),
    13: (0, 2),
    14: (208,),
}
"""By ggml's number of a type (Q4_0 to Q6_K): where in a block its scales and minima are, which are 16-bit floats."""


class GGUFTensorSource:
    """See `meshlm.workers.weights.sources.Source`. Reads from the mapped file."""

    dtype = "F32"  # what decoding gives

    def __init__(self, path: Path, mapped: np.memmap[Any, Any], tensor: GGUFTensor, head_dim: int) -> None:
        self._path, self.ggml_type, self._head_dim = path, tensor.ggml_type, head_dim
        self.shape = tuple(reversed(tensor.shape))
        self._block, block_bytes = _block(path, tensor.ggml_type)
        if not self.shape or not all(self.shape):
            raise ProcessFatal(f"{path}: cannot be read (a tensor of shape {self.shape})")
        row_bytes = self.shape[-1] // self._block * block_bytes
        lines = self.shape[:-1]
        end = tensor.offset + math.prod(lines) * row_bytes
        if self.shape[-1] % self._block or end > len(mapped):
            raise ProcessFatal(f"{path}: cannot be read, perhaps cut short (a tensor ends at byte {end})")
        self._data = torch.from_numpy(mapped[tensor.offset : end]).view(*lines, row_bytes)  # uint8
        self._block_bytes = block_bytes

    def of_expert(self, number: int) -> "GGUFTensorSource":
        """One of the matrices of a tensor that holds those of all experts."""
        one = copy(self)
        one.shape, one._data = self.shape[1:], self._data[number]
        return one

    def of_rows(self, begin: int, end: int) -> "GGUFTensorSource":
        """One of the weights of a tensor that holds several, one below the other."""
        one = copy(self)
        one.shape, one._data = (end - begin, *self.shape[1:]), self._cut(0, begin, end)
        return one

    def like(self, shape: tuple[int, ...]) -> "GGUFTensorSource":
        """With the dimensions of one that llama.cpp leaves out: a vector as a matrix of one row, taps of channels as those of a filter
        each."""
        if len(shape) != len(self.shape) + 1:
            return self
        at = next(
            (at for at, size in enumerate(shape[:-1]) if size == 1 and shape[:at] + shape[at + 1 :] == self.shape), None
        )
        if at is None:
            return self
        one = copy(self)
        one.shape, one._data = shape, self._data.unsqueeze(at)
        return one

    def cuts(self, dim: int, begin: int, end: int) -> bool:
        """Whether that part is made of whole blocks."""
        return dim < len(self.shape) - 1 or (begin % self._block == 0 and end % self._block == 0)

    def _cut(self, dim: int, begin: int, end: int) -> Tensor:
        if dim < len(self.shape) - 1:
            return self._data.narrow(dim, begin, end - begin)
        return self._data[..., begin // self._block * self._block_bytes : end // self._block * self._block_bytes]

    def rows(self, dim: int, begin: int, end: int) -> tuple[Rows, Tensor | None]:
        """A part of a matrix that `cuts`, not decoded; and int64, which of its rows comes first, second, ... (None: as they are)."""
        rows = Rows(self._cut(dim, begin, end), self.ggml_type)
        return rows, _unpermute(torch.arange(rows.data.shape[0]), self._head_dim) if self._head_dim else None

    def check_scales(self, name: str, rows: Rows) -> None:
        """ProcessFatal for a scale in these rows that is NaN or infinite: what stays packed shows it nowhere else."""
        blocks = rows.data.unflatten(-1, (-1, self._block_bytes))
        for at in _HALVES.get(rows.ggml_type, ()):
            if bool((blocks[..., at + 1] & 0x7C == 0x7C).any()):  # all bits of the exponent, in the second byte
                raise ProcessFatal(f"{self._path}: tensor {name}: a scale must be a number, and one is not")

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        if self.cuts(dim, begin, end):
            values = self._decode(self._cut(dim, begin, end))
        else:
            values = self._decode(self._data).narrow(dim, begin, end - begin)
        return _unpermute(values, self._head_dim) if self._head_dim else values

    def whole(self) -> Tensor:
        return self.part(0, 0, self.shape[0])

    def _decode(self, data: Tensor) -> Tensor:
        if self.ggml_type in _FLOATS:
            return data.contiguous().view(_FLOATS[self.ggml_type])
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            return torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType(self.ggml_type)).copy())
        except (ValueError, KeyError, IndexError, NotImplementedError) as error:
            raise ProcessFatal(f"{self._path}: cannot be decoded ({error})") from None


def _block(path: Path, ggml_type: int) -> tuple[int, int]:
    """Numbers and bytes of a block."""
    if ggml_type in _FLOATS:
        return 1, _FLOATS[ggml_type].itemsize
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
        return int(numbers), int(size)
    except (ValueError, KeyError):
        raise ProcessFatal(f"{path}: a tensor has type {ggml_type}, which the gguf package does not know") from None


def encoded_tensors(path: Path, spec: ModelSpec) -> Iterator[tuple[str, GGUFTensorSource]]:
    """Any quantisation that the gguf package decodes. All tensors can be read as long as one of them is kept. ProcessFatal.

    Tensors have Hugging Face's names; one that no model here has keeps its own. All are held against the file's size before the first
    is read: reading past a mapped file's end is SIGBUS.
    """
    files = files_of(path)
    try:
        tensors = read_header(path, lambda name: False).tensors
        mapped: list[np.memmap[Any, Any]] = [
            np.memmap(file, np.uint8, mode="c")  # torch wants to be allowed to write
            for file in files
        ]
    except (GGUFError, OSError, ValueError) as error:
        raise ProcessFatal(f"{path}: cannot be read, perhaps cut short ({error})") from None
    names: dict[str, list[Weight]] = {}
    for weight in weights_of(spec).values():
        names.setdefault(weight.gguf, []).append(weight)
    family = family_of(spec.architecture)
    interleaved = family is not None and family.gguf is not None and family.gguf.interleaved_heads
    found: list[tuple[str, GGUFTensorSource]] = []
    for name, tensor in tensors.items():
        weights = names.get(name, [])
        if not weights and (parts := _parts(name, family, names)):
            found += _split(path, name, GGUFTensorSource(files[tensor.part], mapped[tensor.part], tensor, 0), parts)
            continue
        if not weights and _NEEDLESS.fullmatch(name):
            continue
        turned = interleaved and bool(weights) and name.partition(".attn_")[2].startswith(("q.", "k."))
        source = GGUFTensorSource(files[tensor.part], mapped[tensor.part], tensor, spec.head_dim if turned else 0)
        if not weights or weights[0].expert is None:
            found.append((weights[0].name if weights else name, source.like(weights[0].shape) if weights else source))
            continue
        if source.shape[:1] != (len(weights),) or len(source.shape) != 1 + len(weights[0].shape):
            raise ProcessFatal(
                f"{path}: tensor {name} has shape {source.shape}; it must have a matrix for {len(weights)} experts"
            )
        found += [(weight.name, source.of_expert(nth)) for nth, weight in enumerate(weights)]
    yield from found


def _parts(name: str, family: Family | None, names: dict[str, list[Weight]]) -> list[Weight]:
    """The weights that this tensor holds, one below the other (GGUFFamily.packed); none: it is no such tensor."""
    match = _OF_LAYER.fullmatch(name)
    stems = (
        family.gguf.packed.get(match["stem"], ()) if match and family is not None and family.gguf is not None else ()
    )
    return [weight for stem in stems if match for weight in names.get(f"{match['layer']}.{stem}.{match['kind']}", ())]


def _split(
    path: Path, name: str, source: GGUFTensorSource, parts: list[Weight]
) -> Iterator[tuple[str, GGUFTensorSource]]:
    ends = list(accumulate(weight.shape[0] for weight in parts))
    if source.shape[:1] != (ends[-1],):
        raise ProcessFatal(f"{path}: tensor {name} has shape {source.shape}; it must have {ends[-1]} rows")
    for weight, begin, end in zip(parts, [0, *ends], ends, strict=False):
        yield weight.name, source.of_rows(begin, end)


def _unpermute(values: Tensor, head_dim: int) -> Tensor:
    """Whole heads, each from neighbours to halves."""
    shape = values.shape
    return values.reshape(-1, head_dim // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
