"""Qwen2 (Yang et al. 2024): biases of query, key and value; the layers from max_window_layers on may slide."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer
from meshlm.architectures.dense import dense_gguf, dense_spec, layer_types, sliding_window
from meshlm.architectures.family import Family, GGUFFamily
from meshlm.architectures.layers import with_attention
from meshlm.architectures.weights import transformer_weights
from meshlm.protocol.model import ModelSpec

DEFAULTS = {"num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    window, sliding = windows(config)
    spec = dense_spec(config, architecture)
    return with_attention(replace(spec, attention_bias=True, output_bias=False), sliding, sliding_window=window)


def windows(config: dict[str, Any]) -> tuple[int, tuple[bool, ...]]:
    """The window, and which layers use it. ValueError."""
    window, kinds, layers = sliding_window(config), layer_types(config), integer(config, "num_hidden_layers")
    if not boolean(config, "use_sliding_window"):
        window = 0
    if kinds is None:
        first = integer(config, "max_window_layers", layers)
        sliding = [layer >= first for layer in range(layers)]
    else:
        sliding = [kind == "sliding_attention" for kind in kinds]
    return (window, tuple(sliding)) if window and any(sliding) else (0, ())


FAMILY = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    spec=_spec,
    weights=transformer_weights,
    defaults=DEFAULTS,
    gguf=GGUFFamily("qwen2", dense_gguf),
)
