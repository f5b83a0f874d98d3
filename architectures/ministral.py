"""Ministral (Mistral AI 2024): Mistral of which some layers slide and the others see all."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.dense import dense_spec, dense_weights, sliding_layers
from meshlm.architectures.family import Family
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    layers = config["num_hidden_layers"]
    window, sliding = sliding_layers(
        config, layers + 1 if type(layers) is int else 1
    )  # all, unless the file names them
    return replace(dense_spec(config, architecture), sliding_window=window, sliding_layers=sliding)


FAMILY = Family(
    architecture="MinistralForCausalLM",
    model_type="ministral",
    spec=_spec,
    weights=dense_weights,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
)
