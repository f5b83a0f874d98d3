"""What a .gguf file says of its model: metadata, where its tensors lie, the model's shape. Reads no weights.

A small reader of our own, because the `gguf` package's takes 190 MB and 2.5 s for a vocabulary of 49,152 tokens and every detokenizer
would pay that; it also maps all tensors. Source of format and keys: the GGUF specification (ggml/docs/gguf.md).
"""

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from meshlm.architectures import gguf_keys
from meshlm.architectures.family import GGUFMetadata, MetadataError
from meshlm.architectures.registry import gguf_families, gguf_family
from meshlm.protocol.model import ModelSpec

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MAX_ROPE_FACTORS = 1024
READABLE_TYPES = frozenset((0, 1, 2, 3, 6, 7, 8, *range(10, 15), *range(16, 24), 29, 30, 34, 35, 39))
"""Types of tensors that can be decoded, by ggml's numbers: floats, Q4_0 to Q6_K, IQ, TQ and MXFP4."""
_ALIGNMENT = 32  # of tensor data, unless general.alignment says otherwise
# What bytes that mean something else may raise: too few of them, an array in an array in an array, text or a list for a number.
_UNREADABLE = (struct.error, OSError, ValueError, TypeError, ArithmeticError, MemoryError, RecursionError)


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

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner in _SCALARS:
                layout = f"<{count}{_SCALARS[inner]}"
                values = list(struct.unpack_from(layout, self.data, self.at))
                self.at += struct.calcsize(layout)
                return values
            return [self.value(inner) for _ in range(count)]
        if kind not in _SCALARS:
            raise struct.error(f"value type {kind} is unknown")
        return self.scalar(_SCALARS[kind])


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
                value = cursor.value(cursor.scalar("I"))
                if name == "general.alignment":
                    align = int(value)
                if wanted(name):
                    fields[name] = value
            return GGUFHeader(fields, _tensors(cursor, num_tensors, align))
    except GGUFError:
        raise
    except _UNREADABLE as error:
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


_VOCABULARY = {f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type")}


def read_spec(path: Path) -> tuple[ModelSpec, dict[str, Any], tuple[str, ...]]:
    """The model's shape, the metadata outside the vocabulary (bos and eos ids, chat template), and notes for the user. GGUFError."""
    fields, tensors = read_header(path, lambda name: name not in _VOCABULARY)
    try:
        spec = _spec(path, fields, tensors)
        return spec, fields, tuple(f"{path}: {note}" for note in _notes(path, fields, tensors, spec))
    except GGUFError:
        raise
    except _UNREADABLE as error:
        raise GGUFError(f"{path}: metadata of another kind than expected ({error})") from None


def _spec(path: Path, fields: dict[str, Any], tensors: dict[str, GGUFTensor]) -> ModelSpec:
    kind, family = fields.get("general.architecture"), gguf_family(fields)
    if not isinstance(kind, str) or family is None:
        known = ", ".join(sorted(gguf_families()))
        raise GGUFError(f"{path}: architecture {kind!r} is not supported; supported: {known}")
    assert family.gguf is not None
    shapes = {name: tuple(reversed(tensor.shape)) for name, tensor in tensors.items()}
    try:
        return family.gguf.spec(GGUFMetadata(kind, fields, shapes, _rope_factors(path, tensors)), family.architecture)
    except MetadataError as error:
        raise GGUFError(f"{path}: {error}") from None


def _notes(path: Path, fields: dict[str, Any], tensors: dict[str, GGUFTensor], spec: ModelSpec) -> tuple[str, ...]:
    """GGUFError for what would change the model's answers, or cannot be read."""
    kind = fields["general.architecture"]
    try:
        family = gguf_family(fields)
        notes = gguf_keys.check(fields, kind, family.gguf.keys if family and family.gguf else frozenset())
    except ValueError as error:
        raise GGUFError(f"{path}: {error}") from None
    same = {
        "rope.dimension_count": spec.rotary_dim,
        "attention.value_length": spec.head_dim,
        "vocab_size": spec.vocab_size,
    }
    if spec.mla is not None:
        del same["attention.value_length"]  # the family has read it
    for key, wanted in same.items():
        if fields.get(f"{kind}.{key}", wanted) != wanted:
            raise GGUFError(
                f"{path}: metadata {kind}.{key} is {fields[f'{kind}.{key}']}; only {wanted} is supported here"
            )
    bad = [(name, tensor.ggml_type) for name, tensor in tensors.items() if tensor.ggml_type not in READABLE_TYPES]
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise GGUFError(f"{path}: tensor {bad[0][0]} has type {bad[0][1]}, which cannot be read{more}")
    return notes


def _rope_factors(path: Path, tensors: dict[str, GGUFTensor]) -> tuple[float, ...]:
    """The divisor of each RoPE frequency. Llama 3.1's files say their scaling so, and in no metadata."""
    tensor = tensors.get("rope_freqs.weight")
    if tensor is None:
        return ()
    if tensor.ggml_type != 0 or len(tensor.shape) != 1 or tensor.shape[0] > MAX_ROPE_FACTORS:
        raise GGUFError(f"{path}: tensor rope_freqs.weight has type {tensor.ggml_type} and shape {tensor.shape}")
    with path.open("rb") as file:
        file.seek(tensor.offset)
        factors = struct.unpack(f"<{tensor.shape[0]}f", file.read(4 * tensor.shape[0]))
    if not all(0 < factor < math.inf for factor in factors):
        raise GGUFError(f"{path}: tensor rope_freqs.weight holds what is no positive number")
    return factors
