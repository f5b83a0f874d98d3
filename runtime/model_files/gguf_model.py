"""The model that a .gguf file holds: its shape, or one line that says which metadata cannot be honoured. Reads no weights.

Called by model_files.py; imports no torch. The family (architectures/) reads the metadata.
"""

import math
import struct
from pathlib import Path
from typing import Any

from meshlm.architectures import gguf_keys
from meshlm.architectures.family import GGUFMetadata, MetadataError
from meshlm.architectures.registry import gguf_family, gguf_kinds
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.model_files.gguf_files import UNREADABLE, GGUFError, GGUFTensor, files_of, read_header

MAX_ROPE_FACTORS = 1024
READABLE_TYPES = frozenset((0, 1, 2, 3, 6, 7, 8, *range(10, 15), *range(16, 24), 29, 30, 34, 35, 39))
"""Types of tensors that can be decoded, by ggml's numbers: floats, Q4_0 to Q6_K, IQ, TQ and MXFP4."""
_VOCABULARY = {f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type")}


def read_spec(path: Path) -> tuple[ModelSpec, dict[str, Any], tuple[str, ...]]:
    """The model's shape, the metadata outside the vocabulary (bos and eos ids, chat template), and notes for the user. GGUFError."""
    fields, tensors = read_header(path, lambda name: name not in _VOCABULARY)
    try:
        spec = _spec(path, fields, tensors)
        return spec, fields, tuple(f"{path}: {note}" for note in _notes(path, fields, tensors, spec))
    except UNREADABLE as error:
        raise GGUFError(f"{path}: metadata of another kind than expected ({error})") from None


def _spec(path: Path, fields: dict[str, Any], tensors: dict[str, GGUFTensor]) -> ModelSpec:
    kind, family = fields.get("general.architecture"), gguf_family(fields)
    if not isinstance(kind, str) or family is None:
        known = ", ".join(sorted(gguf_kinds()))
        raise GGUFError(f"{path}: architecture {kind!r} is not supported; supported: {known}")
    assert family.gguf is not None
    shapes = {name: tuple(reversed(tensor.shape)) for name, tensor in tensors.items()}
    try:
        names = ("freqs", "factors_short", "factors_long")
        factors = [_rope_factors(path, tensors, f"rope_{name}.weight") for name in names]
        metadata = GGUFMetadata(kind, fields, shapes, factors[0], (factors[1], factors[2]))
        return family.gguf.spec(metadata, family.architecture)
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
        "attention.value_length": spec.full_head_dim,
        "vocab_size": spec.vocab_size,
    }
    if spec.mla is not None:
        del same["attention.value_length"]  # the family has read it
    if not any(one.rotates for one in spec.attentions):
        del same["rope.dimension_count"]  # nothing is turned
    for key, wanted in same.items():
        if fields.get(f"{kind}.{key}", wanted) != wanted:
            given = fields[f"{kind}.{key}"]
            raise GGUFError(f"{path}: metadata {kind}.{key} is {given}; only {wanted} is supported here")
    bad = [(name, tensor.ggml_type) for name, tensor in tensors.items() if tensor.ggml_type not in READABLE_TYPES]
    if bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise GGUFError(f"{path}: tensor {bad[0][0]} has type {bad[0][1]}, which cannot be read{more}")
    return notes


def _rope_factors(path: Path, tensors: dict[str, GGUFTensor], name: str) -> tuple[float, ...]:
    """The divisor of each RoPE frequency. Llama 3.1's files say their scaling so, and in no metadata; Phi-3's have two such tensors."""
    tensor = tensors.get(name)
    if tensor is None:
        return ()
    if tensor.ggml_type != 0 or len(tensor.shape) != 1 or tensor.shape[0] > MAX_ROPE_FACTORS:
        raise GGUFError(f"{path}: tensor {name} has type {tensor.ggml_type} and shape {tensor.shape}")
    with files_of(path)[tensor.part].open("rb") as file:
        file.seek(tensor.offset)
        factors = struct.unpack(f"<{tensor.shape[0]}f", file.read(4 * tensor.shape[0]))
    if not all(0 < factor < math.inf for factor in factors):
        raise GGUFError(f"{path}: tensor {name} holds what is no positive number")
    return factors
