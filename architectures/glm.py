"""GLM-4 of 2024, as transformers has it (GLM Team 2024): a Llama that turns half of each head, neighbour by neighbour."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.dense import dense_gguf, dense_spec, one_window, partly_rotated, refuse_quantised
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
    refuse_quantised(config, architecture)
    spec = dense_spec({**config, "mlp_bias": False}, architecture)
    one_window(config, spec, slides=False)
    return replace(spec, output_bias=False)


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
