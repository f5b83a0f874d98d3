"""Llama (Touvron et al. 2023; Grattafiori et al. 2024)."""

from typing import Any

from meshlm.architectures.dense import dense_gguf, dense_spec, one_window
from meshlm.architectures.family import Family, GGUFFamily
from meshlm.architectures.layers import with_attention
from meshlm.architectures.weights import transformer_weights
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = dense_spec(config, architecture)
    return with_attention(spec, sliding_window=one_window(config, spec, slides=False))


FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    spec=_spec,
    weights=transformer_weights,
    gguf=GGUFFamily("llama", dense_gguf, interleaved_heads=True),
)
