"""OLMo (Groeneveld et al. 2024), the first: layer norms without weights, and queries, keys and values that may be clipped.
OLMo 2 (OLMo Team 2024): norms behind attention and MLP, and over all query heads together, all key heads together.
OLMo 3 (OLMo Team 2025): OLMo 2 of which three layers in four slide; only those that see all are stretched by YaRN.
OLMoE (Muennighoff et al. 2024): experts in each layer; norms over all query heads together, all key heads together.
EXAONE 4 (LG AI Research 2025): norms behind attention and MLP. Where some layers slide, the others have no positions.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from meshlm.architectures import dense, layers
from meshlm.architectures.config_values import number, shown, words
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Split, Weight
from meshlm.architectures.layer_norms import LAYER_NORMS, layer_norm_form, layer_norm_gguf, layer_norm_spec
from meshlm.architectures.rope import ropes_by_kind
from meshlm.architectures.weights import Norms, attention_weights, transformer_weights
from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import LayerNormSpec, ModelSpec, RopeSpec

_ORDER = LayerNormSpec(gated=True, affine=False)


def _olmo_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = layer_norm_spec({**config, "eps": 1e-5}, architecture, _ORDER, eps="eps")
    return replace(spec, norm_bias=False, clip_qkv=number(config.get("clip_qkv") or 0.0, "clip_qkv"))


def _olmo_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec = layer_norm_gguf(metadata, architecture, _ORDER, "silu")
    return replace(spec, clip_qkv=float(metadata.get("attention.clamp_kqv", 0.0)))


OLMO = LAYER_NORMS._replace(
    architecture="OlmoForCausalLM",
    model_type="olmo",
    spec=_olmo_spec,
    keys=words("clip_qkv"),
    defaults={"hidden_act": "silu", "max_position_embeddings": 2048},
    gguf=layer_norm_form("olmo", _olmo_gguf, "attention.clamp_kqv", interleaved_heads=True),
)
POST_NORMS: Norms = (
    ("post_attention_layernorm", "post_attention_norm", "attention_out_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm", "mlp_out_norm"),
)
_OLMO2_EVERY = 4  # of so many layers of OLMo 3 the last sees all
DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}


def olmo_attention(spec: ModelSpec, layer: LayerSpec) -> Iterator[Weight]:
    """The tensors of a layer's attention, with norms of all its query heads together and all its key heads."""
    query, key = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    yield from attention_weights(spec, layer)
    yield Weight(
        "self_attn.q_norm.weight", "attn_q_norm.weight", "attention.query_norm.weight", (query,), Split.QUERY_HEADS
    )
    yield Weight("self_attn.k_norm.weight", "attn_k_norm.weight", "attention.key_norm.weight", (key,), Split.KV_HEADS)


_OLMO_WEIGHTS = partial(transformer_weights, norms=POST_NORMS, attention=olmo_attention)


def _olmo2_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """A file with a window is of OLMo 3: llama.cpp has one name for both."""
    spec = dense.gguf_sliding(metadata, dense.dense_gguf(metadata, architecture), _OLMO2_EVERY)
    if not spec.sliding_window:
        return spec
    theta = float(metadata.get("rope.freq_base_swa", spec.rope.rope_theta))
    return replace(spec, architecture="Olmo3ForCausalLM", sliding_rope=RopeSpec(rope_theta=theta))


OLMO2 = Family(
    architecture="Olmo2ForCausalLM", model_type="olmo2", spec=dense.full_spec, weights=_OLMO_WEIGHTS, defaults=DEFAULTS,
    gguf=GGUFFamily("olmo2", _olmo2_gguf, dense.GGUF_SLIDING | {"rope.freq_base_swa"}),
    model="meshlm.workers.models.post_norm:Olmo",
)  # fmt: skip
_OLMO3_EVERY = 4  # of so many layers the last sees all
_THETA = 500_000.0


def _olmo2_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    theta = config.get("rope_theta") or _THETA
    rope, sliding_rope = ropes_by_kind(config, theta, theta)
    window, sliding = dense.sliding_layers(config, _OLMO3_EVERY)
    spec = replace(dense.dense_spec(config, architecture, rope), sliding_rope=sliding_rope)
    return layers.with_attention(spec, sliding, sliding_window=window)


OLMO3 = Family(
    architecture="Olmo3ForCausalLM", model_type="olmo3", spec=_olmo2_spec, weights=_OLMO_WEIGHTS,
    defaults={**DEFAULTS, "sliding_window": 4096}, model="meshlm.workers.models.post_norm:Olmo",
)  # fmt: skip


def _olmoe_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = dense.full_spec({**config, "mlp_bias": False}, architecture)
    clip = number(config.get("clip_qkv") or 0.0, "clip_qkv")
    return layers.with_experts(replace(spec, clip_qkv=clip), layers.moe_spec(config, wide="intermediate_size"))


def _olmoe_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    clip = float(metadata.get("attention.clamp_kqv", 0.0))
    return layers.with_experts(
        replace(dense.dense_gguf(metadata, architecture), clip_qkv=clip), layers.gguf_moe(metadata)
    )


OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    spec=_olmoe_spec,
    weights=lambda spec: transformer_weights(spec, attention=olmo_attention),
    keys=words("clip_qkv num_experts num_experts_per_tok norm_topk_prob"),
    defaults={**DEFAULTS, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
    gguf=GGUFFamily("olmoe", _olmoe_gguf, layers.GGUF_KEYS | {"attention.clamp_kqv"}, experts=True),
    model="meshlm.workers.models.post_norm:Olmoe",
)
_OLMO2_FAMILIES = (OLMO2, OLMO3, OLMOE)
_EXAONE4_EVERY = 4  # of so many layers the last sees all
_LARGE, _WINDOW = 64, 4096  # layers of the 32B model, and its window


def _exaone4_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    every = config.get("sliding_window_pattern", _EXAONE4_EVERY)
    if dense.layer_types(config) is None and config.get("sliding_window") and (type(every) is not int or every < 1):
        raise ValueError(f"sliding_window_pattern {shown(every)} without layer_types is not supported")
    window, sliding = dense.sliding_layers(config, every if type(every) is int else 0)
    spec = dense.dense_spec({**config, "attention_bias": False, "mlp_bias": False}, architecture)
    spec = layers.with_attention(replace(spec, qk_norm=True), sliding, sliding_window=window)
    return layers.rotating_where_sliding(spec) if config.get("sliding_window") else spec


def _exaone4_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """The window and the kinds of layers: three in four of the larger model slide, whose first files name no window."""
    spec = dense.dense_gguf(metadata, architecture)
    window = _WINDOW if spec.num_hidden_layers == _LARGE else 0
    spec = dense.gguf_sliding(metadata, replace(spec, qk_norm=True), _EXAONE4_EVERY, window)
    return layers.rotating_where_sliding(spec) if spec.sliding_window else spec


EXAONE4 = Family(
    architecture="Exaone4ForCausalLM", model_type="exaone4", spec=_exaone4_spec,
    weights=partial(transformer_weights, norms=POST_NORMS), keys=frozenset(("sliding_window_pattern",)),
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "sliding_window": 4096},
    gguf=GGUFFamily("exaone4", _exaone4_gguf, dense.GGUF_SLIDING), model="meshlm.workers.models.post_norm:PostNorm",
)  # fmt: skip
FAMILIES = (OLMO, *_OLMO2_FAMILIES, EXAONE4)
