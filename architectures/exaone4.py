"""EXAONE 4 (LG AI Research 2025): norms behind attention and MLP. Where some layers slide, the others have no positions."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import shown
from meshlm.architectures.dense import dense_spec, dense_weights, layer_types, sliding_layers
from meshlm.architectures.family import Family, Weight
from meshlm.architectures.olmo2 import POST_NORMS
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    every = config.get("sliding_window_pattern", 4)
    if layer_types(config) is None and config.get("sliding_window") and (type(every) is not int or every < 1):
        raise ValueError(f"sliding_window_pattern {shown(every)} without layer_types is not supported")
    window, sliding = sliding_layers(config, every if type(every) is int else 0)
    spec = dense_spec({**config, "attention_bias": False, "mlp_bias": False}, architecture)
    without = tuple(not slides for slides in sliding) if config.get("sliding_window") else ()
    if config.get("sliding_window") and not sliding:
        without = (True,) * spec.num_hidden_layers
    return replace(spec, qk_norm=True, sliding_window=window, sliding_layers=sliding, no_rope_layers=without)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    return dense_weights(spec, POST_NORMS)


FAMILY = Family(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    spec=_spec,
    weights=_weights,
    keys=frozenset(("sliding_window_pattern",)),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096},
    compiles=False,
    model="meshlm.workers.models.post_norm:PostNorm",
)
