"""The tensors of a .gguf file, which may be quantised: decoded as float32, or their rows as they are. A part of sources.py.

Parts are cut out before anything is decoded where the quantisation's blocks allow it: rows always, columns at the borders of blocks.

Some weights stand there in two tensors, or in another order. Latent attention: newer files have kv_b_proj in two tensors, the keys'
part turned round. Gated delta nets: in files of Qwen3-Next the rows of in_proj_qkvz stand by kind (all queries, all keys, all values,
and the gates in a tensor of their own), Hugging Face has them by head of keys; in those of Qwen3.5 neighbouring value heads belong to
different heads of keys.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from meshlm.protocol.layers import StateSpec
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.runtime.model_files.gguf_files import GGUFError, GGUFTensor, files_of, read_header
from meshlm.workers.weights.layouts import to_halves
from meshlm.workers.weights.source import Source

_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # by ggml's numbers of types
_OF_LAYER = re.compile(r"(?P<layer>blk\.\d+)\.(?P<stem>[\w.]+)\.(?P<kind>weight|bias)")
_NEEDLESS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")  # computed here, or read with the shape
_LONG = ("rope_factors_short.weight", "rope_factors_long.weight")  # read with the shape, where the family stretches so
_PACKED = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}  # files of any family may have them in one tensor
_GATE_UP = "ffn_gate_up_exps"  # and these of all experts

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


class GGUFTensorSource(Source):
    dtype = "F32"  # what decoding gives

    def __init__(self, path: Path, mapped: np.memmap[Any, Any], tensor: GGUFTensor) -> None:
        self._path, self.ggml_type = path, tensor.ggml_type
        self._neighbours = (0, 0)  # see Weight.neighbours
        self._is_log = False  # the file has minus the exponential
        # of rows, of columns: which comes first, second, ...
        self._orders: tuple[Tensor | None, Tensor | None] = None, None
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

    def of_weight(self, weight: Weight, head_dim: int) -> "GGUFTensorSource":
        """In the form that this weight has. head_dim: of query and key heads whose rows are stored for rotating neighbours, or 0.

        llama.cpp leaves dimensions of one out, or adds them; norms of groups are a matrix, and A of a state is minus its exponential.
        """
        one = copy(self)
        turned = head_dim > 0 and weight.gguf.partition(".attn_")[2].startswith(("q.", "k."))
        one._neighbours = (head_dim, head_dim) if turned else weight.neighbours
        one._is_log = weight.gguf.endswith(".ssm_a")
        norm = weight.gguf.endswith("ssm_norm.weight") and weight.shape == (math.prod(self.shape),)
        mine, wanted = ([size for size in shape if size != 1] for shape in (self.shape, weight.shape))
        if self.shape == weight.shape or not (mine == wanted or norm):
            return one
        if self.shape[-1] == weight.shape[-1]:  # rows are as long, so blocks are where they were
            one.shape, one._data = weight.shape, self._data.view(*weight.shape[:-1], self._data.shape[-1])
        elif self.ggml_type in _FLOATS:
            one.shape, one._data = weight.shape, self._data.reshape(*weight.shape[:-1], -1)
        return one

    def reordered(self, dim: int, order: Tensor) -> "GGUFTensorSource":
        """With its rows (dim 0) or columns (dim 1) in another order. order: int64, which comes first, second, ..."""
        one = copy(self)
        one._orders = (order, self._orders[1]) if dim == 0 else (self._orders[0], order)
        return one

    def cuts(self, dim: int, begin: int, end: int) -> bool:
        """Whether that part is made of whole blocks."""
        if self._orders[1] is not None:
            return False
        return dim < len(self.shape) - 1 or (begin % self._block == 0 and end % self._block == 0)

    def _cut(self, dim: int, begin: int, end: int) -> Tensor:
        rows = self._orders[0]
        if rows is not None and dim == 0:
            return (
                self._data[rows[begin:end]]
                if len(self.shape) > 1
                else self._data.view(len(rows), -1)[rows[begin:end]].flatten()
            )
        data = self._data if rows is None else self._data[rows]
        if dim < len(self.shape) - 1:
            return data.narrow(dim, begin, end - begin)
        return data[..., begin // self._block * self._block_bytes : end // self._block * self._block_bytes]

    def rows(self, dim: int, begin: int, end: int) -> tuple[Rows, Tensor | None]:
        """A part of a matrix that `cuts`, not decoded; and int64, which of its rows comes first, second, ... (None: as they are)."""
        rows = Rows(self._cut(dim, begin, end), self.ggml_type)
        return rows, to_halves(torch.arange(rows.data.shape[0]), *self._neighbours) if self._neighbours[1] else None

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
            values = self._decode(self._cut(0, 0, self.shape[0]))
            if self._orders[1] is not None:
                values = values[..., self._orders[1]]
            values = values.narrow(dim, begin, end - begin)
        if self._is_log:
            values = values.neg().log()
        return to_halves(values, *self._neighbours) if self._neighbours[1] else values

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
    is read: reading past a mapped file's end is SIGBUS."""
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
        if not weights and (_NEEDLESS.fullmatch(name) or _is_of_draft(name, spec)):
            continue
        if name in _LONG and spec.rope.rope_type == "longrope":
            continue
        source = GGUFTensorSource(files[tensor.part], mapped[tensor.part], tensor)
        heads = spec.head_dim if interleaved else 0
        if not weights and (parts := _parts(name, family, names)):
            found += _split(path, name, source, parts, heads)
            continue
        if not weights and f".{_GATE_UP}." in name:
            pair = [names.get(name.replace(_GATE_UP, f"ffn_{half}_exps"), []) for half in ("gate", "up")]
            found += _experts(path, name, source, pair) if all(pair) else [(name, source)]
            continue
        if not weights or (len(weights) == 1 and weights[0].expert is None):
            found.append((weights[0].name, source.of_weight(weights[0], heads)) if weights else (name, source))
            continue
        found += _experts(path, name, source, [weights])
    yield from found


def _is_of_draft(name: str, spec: ModelSpec) -> bool:
    """Whether the tensor is of a layer that drafts further tokens."""
    match = re.match(r"blk\.(\d+)\.", name)
    return match is not None and 0 <= int(match[1]) - spec.num_hidden_layers < spec.num_nextn_predict_layers


def _experts(
    path: Path, name: str, source: GGUFTensorSource, parts: list[list[Weight]]
) -> Iterator[tuple[str, GGUFTensorSource]]:
    """The matrices of all experts, or of what else stands in one tensor. parts: the weights of all of them that one of the matrices
    holds, one below the other."""
    count, rows = len(parts[0]), sum(weights[0].shape[0] for weights in parts)
    if source.shape[:1] != (count,) or len(source.shape) != 1 + len(parts[0][0].shape):
        raise ProcessFatal(f"{path}: tensor {name} has shape {source.shape}; it must have {count} matrices")
    if len(parts) > 1 and source.shape[1] != rows:
        raise ProcessFatal(f"{path}: tensor {name} has shape {source.shape}; its matrices must have {rows} rows")
    begin = 0
    for weights in parts:
        end = begin + weights[0].shape[0] if len(parts) > 1 else source.shape[1]
        for nth, weight in enumerate(weights):
            yield weight.name, source.of_expert(nth) if len(parts) == 1 else source.of_expert(nth).of_rows(begin, end)
        begin = end


def _parts(name: str, family: Family | None, names: dict[str, list[Weight]]) -> list[Weight]:
    """The weights that this tensor holds, one below the other (GGUFFamily.packed); none: it is no such tensor."""
    match = _OF_LAYER.fullmatch(name)
    packed = _PACKED | dict(family.gguf.packed if family is not None and family.gguf is not None else {})
    stems = packed.get(match["stem"], ()) if match else ()
    return [weight for stem in stems if match for weight in names.get(f"{match['layer']}.{stem}.{match['kind']}", ())]


def _split(
    path: Path, name: str, source: GGUFTensorSource, parts: list[Weight], heads: int
) -> Iterator[tuple[str, GGUFTensorSource]]:
    ends = list(accumulate(weight.shape[0] for weight in parts))
    if source.shape[:1] != (ends[-1],):
        raise ProcessFatal(f"{path}: tensor {name} has shape {source.shape}; it must have {ends[-1]} rows")
    for weight, begin, end in zip(parts, [0, *ends], ends, strict=False):
        yield weight.name, source.of_rows(begin, end).of_weight(weight, heads)


def check_shape(source: GGUFTensorSource, name: str, shape: tuple[int, ...]) -> None:
    """ProcessFatal: the tensor of this name has another one."""
    if source.shape != shape:
        raise ProcessFatal(f"tensor {name} has shape {source.shape}; it must have {shape}")


def paired(
    tensors: Iterable[tuple[str, GGUFTensorSource]],
    half: re.Pattern[str],
    join: Callable[[str, Mapping[str, GGUFTensorSource]], tuple[str, Any]],
) -> Iterator[tuple[str, Any]]:
    """All tensors; both halves of a layer as the one that `join` makes of the layer's number and of them; a lone one keeps its name.

    half: matches a half's whole name; its groups `layer` and `which` say of which layer it is, and which of both."""
    halves: dict[str, dict[str, tuple[str, GGUFTensorSource]]] = {}
    for name, source in tensors:
        match = half.fullmatch(name)
        if match is None:
            yield name, source
        else:
            halves.setdefault(match["layer"], {})[match["which"]] = name, source
    for layer, found in halves.items():
        if len(found) < 2:
            yield from found.values()
        else:
            yield join(layer, {which: source for which, (_, source) in found.items()})


_PAIR = re.compile(r"blk\.(?P<layer>\d+)\.attn_(?P<which>qkv|gate)\.weight")
_VALUES = re.compile(r".*\.linear_attn\.(?:in_proj_[vzba]|v_conv)\.weight|.*\.linear_attn\.(?:A_log|dt_bias)")
_OUT = re.compile(r".*\.linear_attn\.out_proj\.weight")


class ByHead(Source):
    """Queries, keys, values and gates of one head of keys behind those of another."""

    dtype = "F32"

    def __init__(self, qkv: GGUFTensorSource, gate: GGUFTensorSource, spec: ModelSpec, layer: str) -> None:
        state = spec.state
        assert state is not None
        keys = state.n_groups * state.state_size
        for source, name, rows in ((qkv, "qkv", 2 * keys + state.inner), (gate, "gate", state.inner)):
            check_shape(source, f"blk.{layer}.attn_{name}.weight", (rows, spec.hidden_size))
        kinds = torch.arange(2 * keys + 2 * state.inner).split((keys, keys, state.inner, state.inner))
        self._order = torch.cat([kind.view(state.n_groups, -1) for kind in kinds], dim=1).flatten()
        self._qkv, self._gate, self.shape = qkv, gate, (len(self._order), spec.hidden_size)

    def whole(self) -> Tensor:
        return torch.cat((self._qkv.whole().float(), self._gate.whole().float()))[self._order]


def by_head(tensors: Iterable[tuple[str, GGUFTensorSource]], spec: ModelSpec) -> Iterator[tuple[str, Any]]:
    """The tensors of Qwen3-Next, with both of a layer as Hugging Face's one; a lone one keeps its name."""

    def join(layer: str, halves: Mapping[str, GGUFTensorSource]) -> tuple[str, ByHead]:
        both = ByHead(halves["qkv"], halves["gate"], spec, layer)
        return f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight", both

    return paired(tensors, _PAIR, join)


def by_group(
    tensors: Iterable[tuple[str, GGUFTensorSource]], state: StateSpec
) -> Iterator[tuple[str, GGUFTensorSource]]:
    """The tensors of Qwen3.5, with the value heads of one head of keys beside one another."""
    each = state.num_heads // state.n_groups
    for name, source in tensors:
        dim = 0 if _VALUES.fullmatch(name) else 1 if _OUT.fullmatch(name) else None
        if dim is None or each == 1 or source.shape[dim] % state.num_heads:
            yield name, source
            continue
        order = torch.arange(source.shape[dim]).view(each, state.n_groups, -1).transpose(0, 1).flatten()
        yield name, source.reordered(dim, order)


_HALF = re.compile(r"blk\.(?P<layer>\d+)\.attn_(?P<which>[kv])_b\.weight")


class KeysAndValues(Source):
    """Keys [heads, rank, nope], values [heads, wide, rank], head by head in one matrix."""

    dtype = "F32"

    def __init__(self, keys: GGUFTensorSource, values: GGUFTensorSource, spec: ModelSpec, layer: str) -> None:
        mla, heads = spec.mla, spec.num_attention_heads
        assert mla is not None
        for source, which, shape in (
            (keys, "k", (heads, mla.kv_lora_rank, mla.qk_nope_head_dim)),
            (values, "v", (heads, mla.v_head_dim, mla.kv_lora_rank)),
        ):
            check_shape(source, f"blk.{layer}.attn_{which}_b.weight", shape)
        self._keys, self._values = keys, values
        self.shape = heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank

    def whole(self) -> Tensor:
        keys, values = self._keys.whole().float(), self._values.whole().float()
        return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


def joined(tensors: Iterable[tuple[str, GGUFTensorSource]], spec: ModelSpec) -> Iterator[tuple[str, Any]]:
    """Both tensors of a layer as Hugging Face's one, where both are there; a lone one keeps its name."""

    def join(layer: str, halves: Mapping[str, GGUFTensorSource]) -> tuple[str, KeysAndValues]:
        both = KeysAndValues(halves["k"], halves["v"], spec, layer)
        return f"model.layers.{layer}.self_attn.kv_b_proj.weight", both

    return paired(tensors, _HALF, join)
