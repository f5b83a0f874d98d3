"""Tensors that .gguf files hold in two, or in another order, where Hugging Face's files have one. A part of sources.py.

Latent attention: newer files have kv_b_proj in two tensors, the keys' part turned round. Gated delta nets: in files of Qwen3-Next the
rows of in_proj_qkvz stand by kind (all queries, all keys, all values, and the gates in a tensor of their own), Hugging Face has them by
head of keys; in those of Qwen3.5 neighbouring value heads belong to different heads of keys.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meshlm.protocol.layers import StateSpec
from meshlm.protocol.model import ModelSpec
from meshlm.runtime.errors import ProcessFatal
from meshlm.workers.weights.gguf_source import GGUFTensorSource
from meshlm.workers.weights.source import Source


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

    half: matches a half's whole name; its groups `layer` and `which` say of which layer it is, and which of both.
    """
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
