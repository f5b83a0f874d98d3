"""Gemma (Gemma Team 2024), the first: a Llama with scaled embeddings, whose norms' weights are stored as what they have more than 1.
Gemma 2 (Gemma Team 2024): four norms a layer, soft caps of scores and logits, every other layer slides.
A checkpoint holds what its norms' weights have more than 1; a .gguf file holds the weights.
VaultGemma (Google 2025): Gemma 2 with the two norms a layer that Llama has.

Gemma 3, its text models (Gemma Team 2025): norms of query and key heads, five layers of six slide and rotate faster.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, number, words
from meshlm.architectures.dense import activation, dense_gguf, dense_spec, layer_types, sliding_window
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, Weight
from meshlm.architectures.layers import all_but_each, with_attention
from meshlm.architectures.rope import ropes_by_kind
from meshlm.architectures.weights import Norms, transformer_weights
from meshlm.protocol.model import ModelSpec, PerLayerInputSpec, RopeSpec

_ACT = "gelu_pytorch_tanh"


def _gemma_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    act = config.get("hidden_activation") or config.get("hidden_act") or _ACT
    if act == "gelu":
        act = _ACT  # the first files say so and mean this, as transformers knows
    return dense_spec({**config, "hidden_act": act}, architecture)


def per_layer_weights(size: int, hidden: int) -> Iterator[Weight]:
    """The weights of what a layer makes of its vector of a token, of so many numbers."""
    for name, gguf, parameter, shape in (
        ("per_layer_input_gate.weight", "inp_gate", "per_layer_gate.weight", (size, hidden)),
        ("per_layer_projection.weight", "proj", "per_layer_projection.weight", (hidden, size)),
        ("post_per_layer_input_norm.weight", "post_norm", "per_layer_norm.weight", (hidden,)),
    ):
        yield Weight(name, f"{gguf}.weight", parameter, shape)


def per_layer_tables(sizes: PerLayerInputSpec, layers: int, hidden: int) -> Iterator[Weight]:
    own = sizes.hidden_size_per_layer_input
    every = layers * own
    for name, gguf, parameter, shape in (
        ("embed_tokens_per_layer", "per_layer_token_embd", "embed.weight", (sizes.vocab_size_per_layer_input, every)),
        ("per_layer_model_projection", "per_layer_model_proj", "project.weight", (every, hidden)),
        ("per_layer_projection_norm", "per_layer_proj_norm", "norm.weight", (own,)),
    ):
        yield Weight(f"model.{name}.weight", f"{gguf}.weight", f"entry.{parameter}", shape)


GEMMA = Family(
    architecture="GemmaForCausalLM", model_type="gemma", spec=_gemma_spec,
    weights=partial(transformer_weights, norm_plus=1.0), keys=frozenset(("hidden_activation",)),
    defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    gguf=GGUFFamily("gemma", partial(dense_gguf, hidden_act=_ACT)), float16=False,
    model="meshlm.workers.models.gemma:Gemma1",
)  # fmt: skip
SANDWICH_NORMS: Norms = (
    ("input_layernorm", "attn_norm", "input_norm"),
    ("post_attention_layernorm", "post_attention_norm", "attention_out_norm"),
    ("pre_feedforward_layernorm", "ffn_norm", "post_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm", "mlp_out_norm"),
)
KEYS = frozenset(("hidden_activation", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"))
DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096} | {
    "tie_word_embeddings": True
}
_GEMMA2_EVERY = 2  # of so many layers the last sees all
_GEMMA2_LARGEST = 46  # layers of the 27B model, whose query scale a .gguf file does not say


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
    return transformer_weights(spec, SANDWICH_NORMS, norm_plus=1.0)


def _cap(config: dict[str, Any], key: str) -> float:
    return 0.0 if config.get(key) is None else number(config[key], key)


def _gemma2_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec, get = gemma_gguf(metadata, architecture, largest=_GEMMA2_LARGEST), metadata.get
    sliding = all_but_each(_GEMMA2_EVERY, spec.num_hidden_layers)
    return replace(
        with_attention(spec, sliding, sliding_window=int(get("attention.sliding_window", 4096))),
        attn_logit_softcapping=float(get("attn_logit_softcapping", 50.0)),
        final_logit_softcapping=float(get("final_logit_softcapping", 30.0)),
    )


GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    spec=partial(gemma_spec, every=_GEMMA2_EVERY),
    weights=gemma_weights,
    keys=KEYS,
    defaults={**DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    gguf=GGUFFamily(
        "gemma2",
        _gemma2_gguf,
        keys=frozenset(("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")),
    ),
    float16=False,
    model="meshlm.workers.models.gemma:Gemma",
)
_VAULT_NORMS: Norms = (
    ("input_layernorm", "attn_norm", "input_norm"),
    ("pre_feedforward_layernorm", "ffn_norm", "post_norm"),
)
VAULT_GEMMA = GEMMA2._replace(
    architecture="VaultGemmaForCausalLM",
    model_type="vaultgemma",
    weights=partial(transformer_weights, norms=_VAULT_NORMS, norm_plus=1.0),
    gguf=None,
    model="meshlm.workers.models.gemma:Gemma1",
)
_GEMMA3_EVERY = 6  # of so many layers the last sees all
_GEMMA3_LARGEST = 62  # layers of the 27B model, whose query scale a .gguf file does not say
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def _gemma3_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    # A file's context counts its scaled rotation already.
    rope, sliding_rope = ropes_by_kind(
        config, config.get("rope_theta") or _THETA, config.get("rope_local_base_freq") or _LOCAL_THETA
    )
    spec = gemma_spec(config, architecture, integer(config, "sliding_window_pattern", _GEMMA3_EVERY), rope)
    return replace(spec, qk_norm=True, sliding_rope=sliding_rope)


def _gemma3_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec, get = gemma_gguf(metadata, architecture, largest=_GEMMA3_LARGEST), metadata.get
    pattern = get("attention.sliding_window_pattern", _GEMMA3_EVERY)
    sliding = all_but_each(pattern, spec.num_hidden_layers) if isinstance(pattern, int) else tuple(map(bool, pattern))
    if len(sliding) != spec.num_hidden_layers:
        raise MetadataError(f"attention.sliding_window_pattern names {len(sliding)} layers of {spec.num_hidden_layers}")
    return replace(
        with_attention(spec, sliding, sliding_window=int(get("attention.sliding_window"))),
        qk_norm=True,
        sliding_rope=RopeSpec(rope_theta=float(get("rope.freq_base_swa", _LOCAL_THETA))),
        final_logit_softcapping=float(get("final_logit_softcapping", 0.0)),
    )


GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    spec=_gemma3_spec,
    weights=gemma_weights,
    keys=(KEYS - {"attn_logit_softcapping"})
    | {"sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq"},
    defaults=DEFAULTS,
    gguf=GGUFFamily(
        "gemma3",
        _gemma3_gguf,
        keys=words("""
        attention.sliding_window attention.sliding_window_pattern rope.freq_base_swa final_logit_softcapping
    """),
    ),
    float16=False,
    model="meshlm.workers.models.gemma:Gemma",
)
FAMILIES = (GEMMA, GEMMA2, VAULT_GEMMA, GEMMA3)
