"""Command R7B and Command A (Cohere 2025): Command R of which three layers in four slide, and the others have no positions."""

from typing import Any

from meshlm.architectures.cohere import DEFAULTS, GGUF_KEYS, KEYS, MODEL, cohere_gguf, cohere_spec, cohere_weights
from meshlm.architectures.config_values import integer, shown
from meshlm.architectures.dense import sliding_layers
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata
from meshlm.architectures.layers import all_but_each, rotating_where_sliding, with_attention
from meshlm.protocol.model import ModelSpec

_EVERY = 4  # of so many layers the last sees all
_ONLY: dict[str, Any] = {  # published files say these, which transformers takes for granted
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
    "use_parallel_block": True,
    "use_gated_activation": True,
    "use_embedding_sharing": True,
    "use_parallel_embedding": True,
}


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    for key, value in _ONLY.items():
        if config.get(key, value) not in (None, value):
            raise ValueError(f"{key} {shown(config[key])} is not supported; supported: {shown(value)}")
    every = integer(config, "sliding_window_pattern", _EVERY)
    if every < 1 or integer(config, "layer_switch", every) != every:
        raise ValueError(f"sliding_window_pattern {every} with layer_switch {shown(config.get('layer_switch'))}")
    spec = cohere_spec(config, architecture)
    window, sliding = sliding_layers(config, every)
    return rotating_where_sliding(with_attention(spec, sliding, sliding_window=window))


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec = cohere_gguf(metadata, architecture)
    sliding = all_but_each(_EVERY, spec.num_hidden_layers)
    window = int(metadata.get("attention.sliding_window"))
    return rotating_where_sliding(with_attention(spec, sliding, sliding_window=window))


FAMILY = Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    spec=_spec,
    weights=cohere_weights,
    keys=KEYS | _ONLY.keys() | {"sliding_window_pattern", "_sliding_window_pattern", "layer_switch"},
    defaults={**DEFAULTS, "sliding_window": 4096},
    gguf=GGUFFamily("cohere2", _gguf, GGUF_KEYS | {"attention.sliding_window"}, interleaved_heads=True),
    compiles=False,
    model=MODEL,
)
