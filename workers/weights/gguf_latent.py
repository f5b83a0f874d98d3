"""How newer .gguf files hold kv_b_proj of latent attention: in two tensors, keys' part turned round. A part of gguf_source.py."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from meshlm.protocol.model import ModelSpec
from meshlm.workers.weights.gguf_pairs import check_shape, paired
from meshlm.workers.weights.gguf_source import GGUFTensorSource

_HALF = re.compile(r"blk\.(?P<layer>\d+)\.attn_(?P<which>[kv])_b\.weight")


class KeysAndValues:
    """See `meshlm.workers.weights.sources.Source`: keys [heads, rank, nope], values [heads, wide, rank], head by head in one matrix."""

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

    def part(self, dim: int, begin: int, end: int) -> Tensor:
        return self.whole().narrow(dim, begin, end - begin)

    def whole(self) -> Tensor:
        keys, values = self._keys.whole().float(), self._values.whole().float()
        return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


def joined(tensors: Iterable[tuple[str, GGUFTensorSource]], spec: ModelSpec) -> Iterator[tuple[str, Any]]:
    """Both tensors of a layer as Hugging Face's one, where both are there; a lone one keeps its name."""

    def join(layer: str, halves: Mapping[str, GGUFTensorSource]) -> tuple[str, KeysAndValues]:
        both = KeysAndValues(halves["k"], halves["v"], spec, layer)
        return f"model.layers.{layer}.self_attn.kv_b_proj.weight", both

    return paired(tensors, _HALF, join)
