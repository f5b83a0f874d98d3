"""The header of a .gguf file: metadata, and where its tensors lie. Reads no weights; gguf_model.py says which model that is.

A small reader of our own, because the `gguf` package's takes 190 MB and 2.5 s for a vocabulary of 49,152 tokens and every detokenizer
would pay that; it also maps all tensors. Source of format and keys: the GGUF specification (ggml/docs/gguf.md).
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 32  # of tensor data, unless general.alignment says otherwise
# What bytes that mean something else may raise: too few of them, an array in an array in an array, text or a list for a number.
UNREADABLE = (struct.error, OSError, ValueError, TypeError, ArithmeticError, MemoryError, RecursionError)


class GGUFError(ValueError):
    """The file is no usable GGUF file; the text says why."""


class GGUFTensor(NamedTuple):
    """A tensor's place in the file, its type and its shape."""

    shape: tuple[int, ...]  # dimensions, fastest first (ggml's order)
    ggml_type: int
    offset: int  # bytes from the file's begin


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


def read_header(path: Path, wanted: Callable[[str], bool] = lambda name: True) -> GGUFHeader:
    """Metadata whose keys are wanted, and all tensors' places. GGUFError when the file is not GGUF or is cut short."""
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
                value = cursor.value(cursor.scalar("I"), keep=wanted(name))
                if name == "general.alignment":
                    align = int(value)
                if wanted(name):
                    fields[name] = value
            return GGUFHeader(fields, _tensors(cursor, num_tensors, align))
    except GGUFError:
        raise
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
