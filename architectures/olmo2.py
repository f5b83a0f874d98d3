"""OLMo 2 (OLMo Team 2024): norms behind attention and MLP, and over all query heads together, all key heads together."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.dense import GGUF_SLIDING, dense_gguf, dense_spec, gguf_sliding, one_window
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Split, Weight
from meshlm.architectures.weights import (
    Norms,
    attention_weights,
    transformer_weights,
)
from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec, RopeSpec

POST_NORMS: Norms = (
    ("post_attention_layernorm", "post_attention_norm", "attention_out_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm", "mlp_out_norm"),
)
_EVERY = 4  # of so many layers of OLMo 3 the last sees all
DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048}


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = dense_spec(config, architecture)
    one_window(config, spec, slides=False)
    return spec


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
    spec=_spec,
    weights=olmo_weights,
    defaults=DEFAULTS,
    gguf=GGUFFamily("olmo2", _gguf, GGUF_SLIDING | {"rope.freq_base_swa"}),
    compiles=False,
    model="meshlm.workers.models.post_norm:Olmo",
)
