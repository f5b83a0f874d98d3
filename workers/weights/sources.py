"""The sources of weights: tensors with Hugging Face names, one after the other, whatever the file format.

Each is a Source: its shape is known, and a part of it is read only when asked for, so that a rank reads no more than it keeps.

Object storage answers one request slowly and many fast, so its files are read in blocks, several at a time, some ahead of the tensor
that is asked for; what lies before that tensor is forgotten. Short parts are read alone, unless their block is there.
"""

import contextlib
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshlm.architectures.drafters import is_own
from meshlm.architectures.family import Weight
from meshlm.architectures.packed_quantization import stem_of
from meshlm.architectures.quantization import scheme_of
from meshlm.architectures.registry import family_of, weights_of
from meshlm.architectures.text_part import is_spoken, text_tensor
from meshlm.protocol.config import Resolved
from meshlm.protocol.model import ModelSpec, QuantizationScheme
from meshlm.runtime.errors import ModelFilesError, ProcessFatal
from meshlm.runtime.model_files.checkpoint_files import read_header, weight_files
from meshlm.runtime.model_files.object_store import AnyPath, RemotePath, folder_of
from meshlm.workers.weights.gguf_source import by_group, by_head, encoded_tensors, joined
from meshlm.workers.weights.layouts import by_expert, laid_out, parts_of
from meshlm.workers.weights.scales import with_scales
from meshlm.workers.weights.source import ExpertMatrix, Mapped, Part, Source

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
        for ahead in range(number, number + AHEAD):
            begin = ahead * BLOCK
            if ahead not in self._blocks and begin < self._size:
                self._blocks[ahead] = self._pool.submit(self.file.read, begin, min(begin + BLOCK, self._size))


class _Streamed(Source):
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


def encoder_sources(resolved: Resolved, device: torch.device) -> Iterator[tuple[str, Source]]:
    """The tensors of the parts for images and sound, by the names in the files. ProcessFatal."""
    found = _sources(weights_of_model(resolved), resolved.load_format, resolved.spec, device, 0)
    return ((name, source) for name, source in found if text_tensor(name) is None and not is_spoken(name))


DUMMY_STD = 0.02
_OF_LAYER = re.compile(r"(?:model\.)?(?P<layer>(?:mtp\.)?layers\.\d+)\.(?P<stem>.+?)(?:\.(?P<kind>weight|bias))?")


def weights_of_model(resolved: Resolved) -> AnyPath:
    """The folder or file with the weights. ProcessFatal."""
    try:
        return folder_of(resolved.weights_url) if resolved.weights_url else Path(resolved.model_path)
    except ModelFilesError as error:
        raise ProcessFatal(str(error)) from None


def sources(
    path: AnyPath, load_format: str, spec: ModelSpec, device: torch.device, seed: int
) -> Iterator[tuple[str, Source]]:
    """(name, tensor) of all weights; a tensor can be read until the next one is asked for. ProcessFatal."""
    found, family = _sources(path, load_format, spec, device, seed), family_of(spec.architecture)
    if spec.text_part and load_format != "dummy":
        found = ((own, source) for name, source in found if (own := text_tensor(name)) is not None)
    if family is not None and family.rename is not None and load_format != "dummy":
        found = _renamed(found, spec, family.rename, family.unread)
    if spec.draft is not None and load_format != "dummy":
        found = ((name, source) for name, source in found if is_own(name, spec))
    if spec.quantization is not None and spec.quantization.method == "bitsandbytes" and load_format != "dummy":
        found = with_scales(found, spec.quantization)
    if family is not None and family.experts is not None and load_format not in ("dummy", "gguf"):
        found = by_expert(found, spec, family.experts)
    if family is not None and family.layouts and load_format not in ("dummy", "gguf"):
        found = laid_out(found, spec, family.layouts)
    return found if family is None or not family.packed else unpacked(found, spec, family.packed)


def _sources(
    path: AnyPath, load_format: str, spec: ModelSpec, device: torch.device, seed: int
) -> Iterator[tuple[str, Source]]:
    match load_format:
        case "safetensors":
            files = _files(path, load_format)
            if isinstance(path, RemotePath):
                return streamed(tuple(file for file in files if isinstance(file, RemotePath)))
            return _safetensors(_on_disk(files), device)
        case "pt":
            return _pickled(_on_disk(_files(path, load_format)))
        case "gguf":
            assert isinstance(path, Path)
            return _encoded(path, spec)
        case "dummy":
            return ((weight.name, _Random(weight, device, seed)) for weight in weights_of(spec).values())
    raise ProcessFatal(f"--load-format {load_format}: not a file format")


def _encoded(path: Path, spec: ModelSpec) -> Iterator[tuple[str, Source]]:
    found = encoded_tensors(path, spec)
    if spec.mla is not None:
        return joined(found, spec)
    if spec.state is None or spec.state.kind != "gated_delta_net":
        return found
    family = family_of(spec.architecture)
    by_kind = family is not None and family.gguf is not None and family.gguf.delta_by_kind
    return by_head(found, spec) if by_kind else by_group(found, spec.state)


def _renamed(
    tensors: Iterable[tuple[str, Source]], spec: ModelSpec, rename: Callable[[str], str], unread: str
) -> Iterator[tuple[str, Source]]:
    """The tensors by the family's names, without those that another task of the same checkpoint needs (Family.unread)."""
    known = weights_of(spec)
    for name, source in tensors:
        own = rename(name)
        if own in known or not re.fullmatch(unread, own):
            yield own, source


def _files(path: AnyPath, load_format: str) -> tuple[AnyPath, ...]:
    try:
        return weight_files(path, load_format).files
    except ModelFilesError as error:
        raise ProcessFatal(str(error)) from None


def _on_disk(files: tuple[AnyPath, ...]) -> tuple[Path, ...]:
    return tuple(file for file in files if isinstance(file, Path))


def _of_experts(
    name: str, source: Source, stems: list[str], weights: Mapping[str, Weight]
) -> Iterator[tuple[str, Source]]:
    """A tensor that holds the matrices of all experts. stems: with {} for the number of an expert."""
    count = next(number for number in range(len(weights) + 1) if stems[0].format(number) not in weights)
    ends = list(accumulate(weights[stem.format(0)].shape[0] for stem in stems))
    if source.shape[:2] != (count, ends[-1]):
        raise ProcessFatal(f"tensor {name} has shape {source.shape}; it must have {count} matrices of {ends[-1]} rows")
    for expert in range(count):
        for stem, begin, end in zip(stems, [0, *ends], ends, strict=False):
            yield stem.format(expert), ExpertMatrix(source, expert, range(begin, end))


def unpacked(
    tensors: Iterable[tuple[str, Source]], spec: ModelSpec, packed: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, Source]]:
    """Tensors that hold several weights (Family.packed) as those weights. ProcessFatal names one that has other rows than they."""
    weights = weights_of(spec)
    for name, source in tensors:
        if quantised := _quantised_projections(name, spec, packed):
            last, projections, scheme = quantised
            outputs = [weights[f"{stem}.weight"].shape[0] for stem in projections]
            parts = parts_of(name, source, last, outputs, scheme)
            yield from ((f"{stem}.{last}", part) for stem, part in zip(projections, parts, strict=True))
            continue
        match = _OF_LAYER.fullmatch(name)
        stems = packed.get(match["stem"]) if match else None
        names = (
            [f"{_long(match['layer'])}.{stem}.{match['kind'] or 'weight'}" for stem in stems] if match and stems else []
        )
        if names and "{}" in names[0] and names[0].format(0) in weights:
            yield from _of_experts(name, source, names, weights)
            continue
        if not names or any(weight not in weights for weight in names):
            yield name, source  # the model has no such layer, or no such bias: check.py will say it
            continue
        ends = list(accumulate(weights[weight].shape[0] for weight in names))
        if source.shape[:1] != (ends[-1],):
            raise ProcessFatal(f"tensor {name} has shape {source.shape}; it must have {ends[-1]} rows")
        for weight, begin, end in zip(names, [0, *ends], ends, strict=False):
            yield weight, Part(source, 0, begin, end)


def _long(layer: str) -> str:
    """What names of weights begin with, of a layer of the model or of one that drafts."""
    return layer if layer.startswith("mtp.") else f"model.{layer}"


def _quantised_projections(
    name: str, spec: ModelSpec, packed: Mapping[str, tuple[str, ...]]
) -> tuple[str, list[str], QuantizationScheme] | None:
    """Describes a tensor that belongs to several quantised projections: what of them it is, their names, and how they are quantised."""
    module, last = stem_of(name)
    match = _OF_LAYER.fullmatch(module)
    names = [f"{_long(match['layer'])}.{one}" for one in packed.get(match["stem"], ())] if match else []
    if not names or last == "bias" or any(f"{one}.weight" not in weights_of(spec) for one in names):
        return None
    scheme = scheme_of(spec.quantization, names[0])
    return None if scheme is None or scheme.online else (last, names, scheme)


class _Slice(Source):
    """A tensor of a safetensors file, read in parts."""

    def __init__(self, opened: Any, name: str) -> None:
        self._opened, self._name, self._slice = opened, name, opened.get_slice(name)
        self.shape, self.dtype = tuple(self._slice.get_shape()), str(self._slice.get_dtype())

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        found: Tensor = self._slice[begin:end] if dim == 0 else self._slice[:, begin:end]
        return found

    def whole(self) -> Tensor:
        found: Tensor = self._opened.get_tensor(self._name)
        return found


def _safetensors(files: tuple[Path, ...], device: torch.device) -> Iterator[tuple[str, Source]]:
    for file in files:  # minutes may pass before the last is reached, and reading past a mapped file's end is SIGBUS
        with opened_file(file, torch.device("cpu")):
            pass
    for file in files:
        with opened_file(file, device) as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield name, _Slice(opened, name)


@contextlib.contextmanager
def opened_file(file: Path, device: torch.device) -> Iterator[Any]:
    """A safetensors file that is as long as its header says. ProcessFatal."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt", device=str(device)) as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ProcessFatal(f"{file}: cannot be read, perhaps cut short ({error})") from None


def _pickled(files: tuple[Path, ...]) -> Iterator[tuple[str, Source]]:
    for file in files:
        try:
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch and pickle raise anything for a file that is broken
            raise ProcessFatal(f"{file}: cannot be read ({str(error).splitlines()[0]})") from None
        if not isinstance(state, dict):
            raise ProcessFatal(f"{file}: it holds a {type(state).__name__}, not names of tensors")
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise ProcessFatal(f"{file}: {name} is a {type(tensor).__name__}, not a tensor")
            yield str(name), Mapped(tensor)


class _Random(Source):
    """A dummy weight: small random numbers, the same for the same seed.

    On the CPU a part has the values that the whole tensor has there; on a GPU only the part is made."""

    def __init__(self, weight: Weight, device: torch.device, seed: int) -> None:
        self._name, self.shape, self._device, self._seed = weight.name, weight.shape, device, seed
        self._norm = 1.0 - weight.plus
        self.dtype = "F32"

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        shape, salt = list(self.shape or (1,)), self._name  # some hold one number
        if self._device.type != "cpu":
            shape[dim] = end - begin
            salt = f"{salt} {begin}"
        if self._name.lower().endswith("norm.weight"):
            made = torch.full(shape, self._norm, device=self._device)
        else:
            generator = torch.Generator(self._device).manual_seed(self._seed << 32 | zlib.crc32(salt.encode()))
            made = torch.empty(shape, device=self._device, dtype=torch.get_default_dtype())
            made.normal_(0.0, DUMMY_STD, generator=generator)
        return made.narrow(dim, begin, end - begin) if self._device.type == "cpu" else made

    def whole(self) -> Tensor:
        return self.part(0, 0, self.shape[0] if self.shape else 1)


def shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a model of this shape, by Hugging Face's name."""
    for weight in weights_of(spec).values():
        yield weight.name, weight.shape
