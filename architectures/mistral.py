"""Mistral (Jiang et al. 2023): a Llama whose layers may all slide. llama.cpp calls it llama."""

from typing import Any

from meshlm.architectures.dense import dense_spec, one_window
from meshlm.architectures.family import Family
from meshlm.architectures.layers import with_attention
from meshlm.architectures.weights import transformer_weights
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = dense_spec(config, architecture)
    return with_attention(spec, sliding_window=one_window(config, spec, slides=True))


FAMILY = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    spec=_spec,
    weights=transformer_weights,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
