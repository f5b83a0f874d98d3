"""Nemotron and Minitron (Parmar et al. 2024): norms whose weights are stored as what they have more than 1; squared ReLU."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import words
from meshlm.architectures.family import GGUFMetadata, Weight
from meshlm.architectures.layer_norms import (
    LAYER_NORMS,
    layer_norm_form,
    layer_norm_gguf,
    layer_norm_spec,
    layer_norm_weights,
)
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_ORDER = LayerNormSpec()


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = layer_norm_spec(config, architecture, _ORDER, eps="norm_eps")
    return replace(spec, output_bias=spec.attention_bias)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    return layer_norm_weights(spec, plus=1.0)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return layer_norm_gguf(metadata, architecture, _ORDER, "relu2")


FAMILY = LAYER_NORMS._replace(
    architecture="NemotronForCausalLM",
    model_type="nemotron",
    spec=_spec,
    weights=_weights,
    keys=words("norm_eps"),
    defaults={"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5, "max_position_embeddings": 4096},
    gguf=layer_norm_form("nemotron", _gguf),
)
