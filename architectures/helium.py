"""Helium (Kyutai 2025): a Llama that turns neighbours."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import refuse_quantised
from meshlm.architectures.dense import full_spec
from meshlm.architectures.family import Family, Weight
from meshlm.architectures.weights import rotating_neighbours, transformer_weights
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    refuse_quantised(config, architecture, "heads rotate neighbours")
    return replace(full_spec(config, architecture), output_bias=False)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    return rotating_neighbours(spec, transformer_weights(spec))


FAMILY = Family(
    architecture="HeliumForCausalLM",
    model_type="helium",
    spec=_spec,
    weights=_weights,
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 20,
        "rms_norm_eps": 1e-8,
        "rope_theta": 100000.0,
        "max_position_embeddings": 4096,
    },
)
