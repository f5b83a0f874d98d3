"""The header of a .gguf file: metadata, and where its tensors lie. Reads no weights; gguf_model.py says which model that is.

A small reader of our own, because the `gguf` package's takes 190 MB and 2.5 s for a vocabulary of 49,152 tokens and every detokenizer
would pay that; it also maps all tensors. Source of format and keys: the GGUF specification (ggml/docs/gguf.md).
"""

import mmap
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from meshlm.runtime.errors import ModelFilesError

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SPLIT = ("split.no", "split.count", "split.tensors.count")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 32  # of tensor data, unless general.alignment says otherwise
# What bytes that mean something else may raise: too few of them, an array in an array in an array, text or a list for a number.
UNREADABLE = (struct.error, OSError, ValueError, TypeError, ArithmeticError, MemoryError, RecursionError)


class GGUFError(ModelFilesError):
    """The file is no usable GGUF file; the text says why."""


class GGUFTensor(NamedTuple):
    """A tensor's place in the file, its type and its shape."""

    shape: tuple[int, ...]  # dimensions, fastest first (ggml's order)
    ggml_type: int
    offset: int  # bytes from the file's begin
    part: int = 0  # which of the model's files (`files_of`) it is in


class GGUFHeader(NamedTuple):
    """Everything before the tensor data."""

    fields: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """Reads typed values from the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        if self.at + length > len(self.data):
            raise struct.error("a string runs past the end")
        text = self.data[self.at : self.at + length].decode("utf-8", "replace")
        self.at += length
        return text

    def value(self, kind: int, *, keep: bool = True) -> Any:
        """The next value; of an array that nobody keeps an empty one."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner in _SCALARS:
                layout = f"<{count}{_SCALARS[inner]}"
                values = list(struct.unpack_from(layout, self.data, self.at)) if keep else []
                self.at += struct.calcsize(layout)
                return values
            if inner == _STRING:
                return self._strings(count, keep)
            return [self.value(inner, keep=keep) for _ in range(count)]
        if kind not in _SCALARS:
            raise struct.error(f"value type {kind} is unknown")
        return self.scalar(_SCALARS[kind])

    def _strings(self, count: int, keep: bool) -> list[str]:
        """In one lean loop: a vocabulary has hundreds of thousands, and each start reads it twice."""
        data, at, end, length_of = self.data, self.at, len(self.data), _LENGTH.unpack_from
        found: list[str] = []
        for _ in range(count):
            begin = at + 8
            at = begin + length_of(data, at)[0]
            if at > end:
                raise struct.error("a string runs past the end")
            if keep:
                found.append(data[begin:at].decode("utf-8", "replace"))
        self.at = at
        return found


def is_later_part(path: Path) -> bool:
    """Whether the name is that of a part behind the first of a model in several files."""
    match = _PART.fullmatch(path.name)
    return match is not None and int(match["number"]) > 1


def files_of(path: Path) -> tuple[Path, ...]:
    """All files of the model whose first this is, as llama.cpp names them (NAME-00001-of-00003.gguf)."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    return tuple(path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))


def read_header(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> GGUFHeader:
    """Metadata whose keys are wanted, and all tensors' places, those of further files too. GGUFError when a file is not GGUF,
    is cut short or is not there."""
    first = _read_file(path, wanted)
    number, count, whole = (_split(path, first, key) for key in _SPLIT)
    fields = {name: value for name, value in first.fields.items() if name not in _SPLIT or wanted(name)}
    if count <= 1:
        return GGUFHeader(fields, first.tensors)
    files = files_of(path)
    if number != 0 or is_later_part(path):
        raise GGUFError(f"{path}: part {number + 1} of {count} of a model; give the first")
    if len(files) != count:
        raise GGUFError(f"{path}: the first of {count} files; their names must end in -00001-of-{count:05}.gguf, ...")
    tensors = dict(first.tensors)
    for nth, file in enumerate(files[1:], 1):
        found = _read_file(file, lambda name: False)
        if (_split(file, found, "split.no"), _split(file, found, "split.count")) != (nth, count):
            raise GGUFError(f"{file}: it is not part {nth + 1} of {count} (split.no, split.count)")
        for name, tensor in found.tensors.items():
            if name in tensors:
                raise GGUFError(f"{file}: tensor {name} is in another part too")
            tensors[name] = tensor._replace(part=nth)
    if whole and len(tensors) != whole:
        raise GGUFError(f"{path}: its {count} parts have {len(tensors)} tensors; split.tensors.count is {whole}")
    return GGUFHeader(fields, tensors)


def _split(path: Path, header: GGUFHeader, key: str) -> int:
    value = header.fields.get(key, 0)
    if type(value) is not int or value < 0:
        raise GGUFError(f"{path}: metadata {key} is {value!r}")
    return value


def _read_file(path: Path, wanted: Callable[[str], bool]) -> GGUFHeader:
    """The header of one file; keys that say how files are split are always wanted."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data)
            if data[:4] != b"GGUF":
                raise GGUFError(f"{path}: not a GGUF file")
            cursor.at = 4
            version, num_tensors, num_fields = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
            if version not in (2, 3):
                raise GGUFError(f"{path}: GGUF version {version}; supported: 2, 3")
            fields: dict[str, Any] = {}
            align = _ALIGNMENT
            for _ in range(num_fields):
                name = cursor.string()
                kept = name in _SPLIT or wanted(name)
                value = cursor.value(cursor.scalar("I"), keep=kept)
                if name == "general.alignment":
                    align = int(value)
                if kept:
                    fields[name] = value
            return GGUFHeader(fields, _tensors(cursor, num_tensors, align))
    except UNREADABLE as error:
        raise GGUFError(f"{path}: not a readable GGUF file ({error})") from None


def _tensors(cursor: _Cursor, count: int, align: int) -> dict[str, GGUFTensor]:
    found = {}
    for _ in range(count):
        name = cursor.string()
        if name in found:
            raise ValueError(f"tensor {name} twice")
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))
        found[name] = GGUFTensor(shape, cursor.scalar("I"), cursor.scalar("Q"))
    begin = -(-cursor.at // align) * align  # of the data
    return {name: tensor._replace(offset=begin + tensor.offset) for name, tensor in found.items()}
