"""SmolLM3 (Bakouch et al. 2025): a Llama of which every fourth layer has no positions."""

from typing import Any

from meshlm.architectures.config_values import boolean, positive, shown
from meshlm.architectures.dense import dense_gguf, dense_spec
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata
from meshlm.architectures.layers import with_attention
from meshlm.architectures.weights import transformer_weights
from meshlm.protocol.model import ModelSpec

_EVERY = 4  # of so many layers the last has no positions


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    if boolean(config, "use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError(f"use_sliding_window and sliding layers are not supported for {architecture}")
    spec = dense_spec(config, architecture)
    return with_attention(spec, without_positions(config, spec.num_hidden_layers), rotates=False)


def without_positions(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """The layers that rotate nothing; the file says 1 of those that do. ValueError."""
    given = config.get("no_rope_layers")
    if given is None:
        every = positive(config, "no_rope_layer_interval", _EVERY)
        return tuple((layer + 1) % every == 0 for layer in range(layers))
    if not isinstance(given, list) or len(given) != layers or any(one not in (0, 1) for one in given):
        raise ValueError(f"no_rope_layers must be 0 or 1 for each of {layers} layers, got {shown(given)}")
    return tuple(not one for one in given)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec = dense_gguf(metadata, architecture)
    return with_attention(spec, without_positions({}, spec.num_hidden_layers), rotates=False)


FAMILY = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    spec=_spec,
    weights=transformer_weights,
    keys=frozenset(("no_rope_layers", "no_rope_layer_interval")),
    defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    gguf=GGUFFamily("smollm3", _gguf, interleaved_heads=True),
)
