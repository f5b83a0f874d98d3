"""Phi-3 and Phi-4 (Abdin et al. 2024): a Llama whose checkpoints hold query, key and value in one tensor, gate and up in another."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.dense import dense_gguf, partly_rotated, windowed_spec
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError
from meshlm.architectures.layers import with_attention
from meshlm.architectures.weights import GGUF_GATE_UP, fused_gate_up, transformer_weights
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = windowed_spec(config, architecture)
    if spec.rope.rope_type == "yarn":
        raise ValueError("rope_type yarn means longrope in old files of this family; name it so")
    return spec


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """llama.cpp's own code takes every layer to see all; the window of the file is what the model was trained with."""
    return partly_rotated(with_long_factors(dense_gguf(metadata, architecture), metadata), metadata)


def with_long_factors(spec: ModelSpec, metadata: GGUFMetadata) -> ModelSpec:
    """The spec with the window and the factors of rotation that a .gguf file of this family has. MetadataError."""
    get = metadata.get
    window = int(get("attention.sliding_window", 0))
    spec = with_attention(spec, sliding_window=window if 0 < window < spec.max_position_embeddings else 0)
    short, long = metadata.long_factors
    if short or long:
        if len(short) != len(long):
            raise MetadataError(
                f"rope_factors_short.weight has {len(short)} numbers, rope_factors_long.weight {len(long)}"
            )
        rope = replace(
            spec.rope,
            rope_type="longrope",
            short_factor=short,
            long_factor=long,
            original_max_position_embeddings=int(get("rope.scaling.original_context_length")),
            attention_factor=float(get("rope.scaling.attn_factor", 1.0)),
        )
        spec = replace(spec, rope=rope)
    return spec


FAMILY = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    spec=_spec,
    weights=lambda spec: fused_gate_up(transformer_weights(spec)),
    packed={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    gguf=GGUFFamily(
        "phi3", _gguf, frozenset(("attention.sliding_window", "rope.scaling.attn_factor")), packed=GGUF_GATE_UP
    ),
)
