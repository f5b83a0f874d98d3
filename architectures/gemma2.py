"""Gemma 2 (Gemma Team 2024): four norms a layer, soft caps of scores and logits, every other layer slides.

A checkpoint holds what its norms' weights have more than 1; a .gguf file holds the weights.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, number
from meshlm.architectures.dense import activation, dense_gguf, dense_spec, layer_types, sliding_window
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.layers import all_but_each, with_attention
from meshlm.architectures.weights import Norms, transformer_weights
from meshlm.protocol.model import ModelSpec, RopeSpec

SANDWICH_NORMS: Norms = (
    ("input_layernorm", "attn_norm", "input_norm"),
    ("post_attention_layernorm", "post_attention_norm", "attention_out_norm"),
    ("pre_feedforward_layernorm", "ffn_norm", "post_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm", "mlp_out_norm"),
)
KEYS = frozenset(("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"))
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_EVERY = 2  # of so many layers the last sees all
_LARGEST = 46  # layers of the 27B model, whose query scale a .gguf file does not say


def gemma_spec(config: dict[str, Any], architecture: str, every: int, rope: RopeSpec | None = None) -> ModelSpec:
    """The ModelSpec of Gemma 2 and 3. Without layer_types, the last of `every` layers sees all. KeyError, ValueError."""
    key = "hidden_activation"
    act = activation({key: config.get(key) or "gelu_pytorch_tanh"}, key)
    spec = dense_spec({**config, "hidden_act": act}, architecture, rope)
    kinds = layer_types(config)
    sliding = (
        all_but_each(every, len(spec.layers)) if kinds is None else tuple(kind == "sliding_attention" for kind in kinds)
    )
    window = sliding_window(config)
    if any(sliding) and not window:
        raise ValueError("sliding_window must be positive where layers slide")
    if integer(config, "query_pre_attn_scalar") < 1:
        raise ValueError(f"query_pre_attn_scalar is {config['query_pre_attn_scalar']}; it must be positive")
    return replace(
        with_attention(spec, sliding, sliding_window=window),
        query_pre_attn_scalar=float(config["query_pre_attn_scalar"]),
        attn_logit_softcapping=_cap(config, "attn_logit_softcapping"),
        final_logit_softcapping=_cap(config, "final_logit_softcapping"),
    )


def gemma_gguf(metadata: GGUFMetadata, architecture: str, *, largest: int) -> ModelSpec:
    """The form of .gguf files that Gemma 2 and 3 have in common. largest: layers of the 27B model."""
    spec = dense_gguf(metadata, architecture)
    inner = spec.hidden_size // spec.num_attention_heads if spec.num_hidden_layers == largest else spec.head_dim
    return replace(spec, hidden_act="gelu_pytorch_tanh", query_pre_attn_scalar=float(inner))


def gemma_weights(spec: ModelSpec) -> Iterator[Weight]:
    """Every tensor."""
    return transformer_weights(spec, SANDWICH_NORMS, norm_plus=1.0)


def _cap(config: dict[str, Any], key: str) -> float:
    return 0.0 if config.get(key) is None else number(config[key], key)


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    return gemma_spec(config, architecture, _EVERY)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec, get = gemma_gguf(metadata, architecture, largest=_LARGEST), metadata.get
    sliding = all_but_each(_EVERY, spec.num_hidden_layers)
    return replace(
        with_attention(spec, sliding, sliding_window=int(get("attention.sliding_window", 4096))),
        attn_logit_softcapping=float(get("attn_logit_softcapping", 50.0)),
        final_logit_softcapping=float(get("final_logit_softcapping", 30.0)),
    )


FAMILY = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    spec=_spec,
    weights=gemma_weights,
    keys=KEYS,
    defaults={**DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    gguf=GGUFFamily(
        "gemma2",
        _gguf,
        keys=frozenset(("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")),
    ),
    float16=False,
    compiles=False,
    model="meshlm.workers.models.gemma:Gemma",
)
