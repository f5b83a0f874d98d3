"""Phi-3 and Phi-4 (Abdin et al. 2024): a Llama whose checkpoints hold query, key and value in one tensor, gate and up in another."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.dense import dense_spec, dense_weights, one_window
from meshlm.architectures.family import Family
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = dense_spec(config, architecture)
    if spec.rope.rope_type == "yarn":
        raise ValueError("rope_type yarn means longrope in old files of this family; name it so")
    return replace(spec, sliding_window=one_window(config, spec, slides=True))


FAMILY = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    spec=_spec,
    weights=dense_weights,
    packed={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
)
