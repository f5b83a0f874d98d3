"""Mistral (Jiang et al. 2023): a Llama whose layers may all slide. llama.cpp calls it llama."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.dense import dense_spec, dense_weights, one_window
from meshlm.architectures.family import Family
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = dense_spec(config, architecture)
    return replace(spec, sliding_window=one_window(config, spec, slides=True))


FAMILY = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    spec=_spec,
    weights=dense_weights,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)
