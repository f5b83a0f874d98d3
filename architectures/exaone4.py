"""EXAONE 4 (LG AI Research 2025): norms behind attention and MLP. Where some layers slide, the others have no positions."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import shown
from meshlm.architectures.dense import GGUF_SLIDING, dense_gguf, dense_spec, gguf_sliding, layer_types, sliding_layers
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.layers import rotating_where_sliding, with_attention
from meshlm.architectures.olmo2 import POST_NORMS
from meshlm.architectures.weights import transformer_weights
from meshlm.protocol.model import ModelSpec

_EVERY = 4  # of so many layers the last sees all
_LARGE, _WINDOW = 64, 4096  # layers of the 32B model, and its window


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    every = config.get("sliding_window_pattern", _EVERY)
    if layer_types(config) is None and config.get("sliding_window") and (type(every) is not int or every < 1):
        raise ValueError(f"sliding_window_pattern {shown(every)} without layer_types is not supported")
    window, sliding = sliding_layers(config, every if type(every) is int else 0)
    spec = dense_spec({**config, "attention_bias": False, "mlp_bias": False}, architecture)
    spec = with_attention(replace(spec, qk_norm=True), sliding, sliding_window=window)
    return rotating_where_sliding(spec) if config.get("sliding_window") else spec


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    return transformer_weights(spec, POST_NORMS)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """Of the larger model, whose first files name no window, three layers in four slide."""
    spec = dense_gguf(metadata, architecture)
    window = _WINDOW if spec.num_hidden_layers == _LARGE else 0
    spec = gguf_sliding(metadata, replace(spec, qk_norm=True), _EVERY, window)
    return rotating_where_sliding(spec) if spec.sliding_window else spec


FAMILY = Family(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    spec=_spec,
    weights=_weights,
    keys=frozenset(("sliding_window_pattern",)),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096},
    gguf=GGUFFamily("exaone4", _gguf, GGUF_SLIDING),
    compiles=False,
    model="meshlm.workers.models.post_norm:PostNorm",
)
