"""GLM-4 of 2024, as transformers has it (GLM Team 2024): a Llama that turns half of each head, neighbour by neighbour.

GLM-4-0414 and GLM-Z1 (GLM Team 2025): GLM with norms behind attention and MLP, too.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import refuse_quantised
from meshlm.architectures.dense import dense_gguf, full_spec, partly_rotated
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.weights import (
    GGUF_GATE_UP,
    PRE_NORMS,
    Norms,
    fused_gate_up,
    rotating_neighbours,
    transformer_weights,
)
from meshlm.protocol.model import ModelSpec

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "max_position_embeddings": 131072,
}
PACKED = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}


def glm_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """The ModelSpec of GLM and GLM-4-0414. KeyError, ValueError."""
    refuse_quantised(config, architecture, "heads rotate neighbours")
    return replace(full_spec({**config, "mlp_bias": False}, architecture), output_bias=False)


def glm_weights(spec: ModelSpec, norms: Norms = PRE_NORMS) -> Iterator[Weight]:
    """Every tensor."""
    return rotating_neighbours(spec, fused_gate_up(transformer_weights(spec, norms)))


def glm_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """MetadataError."""
    spec = partly_rotated(dense_gguf(metadata, architecture), metadata)
    fused = "blk.0.attn_qkv.bias" in metadata.shapes
    return replace(spec, attention_bias=spec.attention_bias or fused, output_bias=False)


FAMILY = Family(
    architecture="GlmForCausalLM",
    model_type="glm",
    spec=glm_spec,
    weights=glm_weights,
    packed=PACKED,
    defaults=DEFAULTS,
    gguf=GGUFFamily("chatglm", glm_gguf, packed=GGUF_GATE_UP),
)


_NORMS: Norms = (
    ("input_layernorm", "attn_norm", "input_norm"),
    ("post_self_attn_layernorm", "post_attention_norm", "attention_out_norm"),
    ("post_attention_layernorm", "ffn_norm", "post_norm"),
    ("post_mlp_layernorm", "post_ffw_norm", "mlp_out_norm"),
)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    return glm_weights(spec, _NORMS)


GLM4 = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    spec=glm_spec,
    weights=_weights,
    packed=PACKED,
    defaults=DEFAULTS,
    gguf=GGUFFamily("glm4", glm_gguf, packed=GGUF_GATE_UP),
    compiles=False,
    model="meshlm.workers.models.gemma:Sandwich",
)
FAMILIES = (FAMILY, GLM4)
