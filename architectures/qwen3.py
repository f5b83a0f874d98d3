"""Qwen3 (Yang et al. 2025): norms of query and key heads in place of Qwen2's biases."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.dense import dense_gguf, dense_spec
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata
from meshlm.architectures.layers import with_attention
from meshlm.architectures.qwen2 import DEFAULTS, windows
from meshlm.architectures.weights import transformer_weights
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    window, sliding = windows(config)
    return with_attention(replace(dense_spec(config, architecture), qk_norm=True), sliding, sliding_window=window)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return replace(dense_gguf(metadata, architecture), qk_norm=True)


FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    spec=_spec,
    weights=transformer_weights,
    defaults={**DEFAULTS, "head_dim": 128},
    gguf=GGUFFamily("qwen3", _gguf),
)
