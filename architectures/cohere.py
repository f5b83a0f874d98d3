"""Command R (Cohere 2024): attention and MLP beside one another behind one layer norm, logits multiplied by a number.
Command R7B and Command A (Cohere 2025): Command R of which three layers in four slide, and the others have no positions.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, number, refuse_quantised, shown, words
from meshlm.architectures.dense import dense_gguf, dense_spec, one_window, sliding_layers
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.layers import all_but_each, rotating_where_sliding, with_attention
from meshlm.architectures.weights import Norms, rotating_neighbours, transformer_weights
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_NORMS: Norms = (("input_layernorm", "attn_norm", "attention_norm"),)
KEYS = words("logit_scale layer_norm_eps")
DEFAULTS: dict[str, Any] = {"max_position_embeddings": 8192} | {
    "logit_scale": 0.0625,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_EPS = "attention.layer_norm_epsilon"
GGUF_KEYS = frozenset((_EPS, "logit_scale"))
MODEL = "meshlm.workers.models.layer_norm:LayerNormDecoder"
ORDER = LayerNormSpec(parallel=1, gated=True)


def cohere_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """The ModelSpec that Command R and Command R7B have in common. KeyError, ValueError."""
    refuse_quantised(config, architecture, "heads rotate neighbours")
    return replace(
        dense_spec({**config, "mlp_bias": False}, architecture),
        rms_norm_eps=number(config["layer_norm_eps"], "layer_norm_eps"),
        logit_scale=number(config["logit_scale"], "logit_scale"),
        layer_norms=ORDER,
    )


def cohere_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """The form of .gguf files that both have in common. MetadataError."""
    spec = dense_gguf(metadata, architecture, _EPS)
    return replace(spec, logit_scale=float(metadata.get("logit_scale")), layer_norms=ORDER)


def cohere_weights(spec: ModelSpec) -> Iterator[Weight]:
    return rotating_neighbours(spec, transformer_weights(spec, _NORMS))


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = cohere_spec(config, architecture)
    one_window(config, spec, slides=False)
    return spec


COHERE = Family(
    architecture="CohereForCausalLM", model_type="cohere", spec=_spec, weights=cohere_weights, keys=KEYS,
    defaults={**DEFAULTS, "rope_theta": 500_000.0},
    gguf=GGUFFamily("command-r", cohere_gguf, GGUF_KEYS, interleaved_heads=True), model=MODEL,
)  # fmt: skip
_EVERY = 4  # of so many layers the last sees all
_ONLY: dict[str, Any] = {  # published files say these, which transformers takes for granted
    "position_embedding_type": "rope_gptj",
    "order_of_interleaved_layers": "local_attn_first",
    "use_parallel_block": True,
    "use_gated_activation": True,
    "use_embedding_sharing": True,
    "use_parallel_embedding": True,
}


def _cohere2_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
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


COHERE2 = Family(
    architecture="Cohere2ForCausalLM", model_type="cohere2", spec=_cohere2_spec, weights=cohere_weights,
    keys=KEYS | _ONLY.keys() | {"sliding_window_pattern", "_sliding_window_pattern", "layer_switch"},
    defaults={**DEFAULTS, "sliding_window": 4096},
    gguf=GGUFFamily("cohere2", _gguf, GGUF_KEYS | {"attention.sliding_window"}, interleaved_heads=True), model=MODEL,
)  # fmt: skip
FAMILIES = (COHERE, COHERE2)
