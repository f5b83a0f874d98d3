"""Ministral (Mistral AI 2024): Mistral of which some layers slide and the others see all."""

from typing import Any

from meshlm.architectures.dense import dense_spec, sliding_layers
from meshlm.architectures.family import Family
from meshlm.architectures.layers import with_attention
from meshlm.architectures.weights import transformer_weights
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    layers = config["num_hidden_layers"]
    window, sliding = sliding_layers(
        config, layers + 1 if type(layers) is int else 1
    )  # all, unless the file names them
    return with_attention(dense_spec(config, architecture), sliding, sliding_window=window)


FAMILY = Family(
    architecture="MinistralForCausalLM",
    model_type="ministral",
    spec=_spec,
    weights=transformer_weights,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
)
