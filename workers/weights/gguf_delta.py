"""How .gguf files hold the mixers of gated delta nets otherwise than Hugging Face's. A part of gguf_source.py.

Qwen3-Next: llama.cpp has the rows of in_proj_qkvz by kind (all queries, all keys, all values, and the gates in a tensor of their own),
Hugging Face has them by head of keys. Qwen3.5: llama.cpp has value heads so that neighbours belong to different heads of keys.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meshlm.protocol.layers import StateSpec
from meshlm.protocol.model import ModelSpec
from meshlm.workers.weights.gguf_pairs import check_shape, paired
from meshlm.workers.weights.gguf_source import GGUFTensorSource

_PAIR = re.compile(r"blk\.(?P<layer>\d+)\.attn_(?P<which>qkv|gate)\.weight")
_VALUES = re.compile(r".*\.linear_attn\.(?:in_proj_[vzba]|v_conv)\.weight|.*\.linear_attn\.(?:A_log|dt_bias)")
_OUT = re.compile(r".*\.linear_attn\.out_proj\.weight")


class ByHead:
    """See `meshlm.workers.weights.sources.Source`: queries, keys, values and gates of one head of keys behind those of another."""

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

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        return self.whole().narrow(dim, begin, end - begin)

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
