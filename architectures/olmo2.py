"""OLMo 2 (OLMo Team 2024): norms behind attention and MLP, and over all query heads together, all key heads together.

OLMo 3 (OLMo Team 2025): OLMo 2 of which three layers in four slide; only those that see all are stretched by YaRN.

OLMoE (Muennighoff et al. 2024): experts in each layer; norms over all query heads together, all key heads together.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import number, words
from meshlm.architectures.dense import GGUF_SLIDING, dense_gguf, dense_spec, full_spec, gguf_sliding, sliding_layers
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Split, Weight
from meshlm.architectures.layers import with_attention, with_experts
from meshlm.architectures.moe import GGUF_KEYS, gguf_moe, moe_spec
from meshlm.architectures.rope import ropes_by_kind
from meshlm.architectures.weights import Norms, attention_weights, transformer_weights
from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec, RopeSpec

POST_NORMS: Norms = (
    ("post_attention_layernorm", "post_attention_norm", "attention_out_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm", "mlp_out_norm"),
)
_EVERY = 4  # of so many layers of OLMo 3 the last sees all
DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}


def olmo_attention(spec: ModelSpec, layer: LayerSpec) -> Iterator[Weight]:
    """The tensors of a layer's attention, with norms of all its query heads together and all its key heads."""
    query, key = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
    yield from attention_weights(spec, layer)
    yield Weight(
        "self_attn.q_norm.weight", "attn_q_norm.weight", "attention.query_norm.weight", (query,), Split.QUERY_HEADS
    )
    yield Weight("self_attn.k_norm.weight", "attn_k_norm.weight", "attention.key_norm.weight", (key,), Split.KV_HEADS)


def olmo_weights(spec: ModelSpec) -> Iterator[Weight]:
    """Every tensor."""
    return transformer_weights(spec, POST_NORMS, attention=olmo_attention)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """A file with a window is of OLMo 3: llama.cpp has one name for both."""
    spec = gguf_sliding(metadata, dense_gguf(metadata, architecture), _EVERY)
    if not spec.sliding_window:
        return spec
    theta = float(metadata.get("rope.freq_base_swa", spec.rope.rope_theta))
    return replace(spec, architecture="Olmo3ForCausalLM", sliding_rope=RopeSpec(rope_theta=theta))


FAMILY = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    spec=full_spec,
    weights=olmo_weights,
    defaults=DEFAULTS,
    gguf=GGUFFamily("olmo2", _gguf, GGUF_SLIDING | {"rope.freq_base_swa"}),
    compiles=False,
    model="meshlm.workers.models.post_norm:Olmo",
)


_OLMO3_EVERY = 4  # of so many layers the last sees all
_THETA = 500_000.0


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    theta = config.get("rope_theta") or _THETA
    rope, sliding_rope = ropes_by_kind(config, theta, theta)
    window, sliding = sliding_layers(config, _OLMO3_EVERY)
    spec = replace(dense_spec(config, architecture, rope), sliding_rope=sliding_rope)
    return with_attention(spec, sliding, sliding_window=window)


OLMO3 = Family(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    spec=_spec,
    weights=olmo_weights,
    defaults={**DEFAULTS, "sliding_window": 4096},
    compiles=False,
    model="meshlm.workers.models.post_norm:Olmo",
)


def _olmoe_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = full_spec({**config, "mlp_bias": False}, architecture)
    clip = number(config.get("clip_qkv") or 0.0, "clip_qkv")
    return with_experts(replace(spec, clip_qkv=clip), moe_spec(config, wide="intermediate_size"))


def _olmoe_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    clip = float(metadata.get("attention.clamp_kqv", 0.0))
    return with_experts(replace(dense_gguf(metadata, architecture), clip_qkv=clip), gguf_moe(metadata))


OLMOE = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    spec=_olmoe_spec,
    weights=lambda spec: transformer_weights(spec, attention=olmo_attention),
    keys=words("clip_qkv num_experts num_experts_per_tok norm_topk_prob"),
    defaults={**DEFAULTS, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
    gguf=GGUFFamily("olmoe", _olmoe_gguf, GGUF_KEYS | {"attention.clamp_kqv"}, experts=True),
    compiles=False,
    model="meshlm.workers.models.olmoe:Olmoe",
)
FAMILIES = (FAMILY, OLMO3, OLMOE)
