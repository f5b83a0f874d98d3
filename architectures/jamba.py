"""Jamba (AI21 2024): Mamba layers, every eighth with attention without positions, and experts in every other."""

from collections.abc import Iterator
from typing import Any

from meshlm.architectures.config_values import integer, words
from meshlm.architectures.dense import dense_gguf, full_spec, layers_that_attend
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.layers import with_attention, with_experts, with_states
from meshlm.architectures.moe import GGUF_KEYS, gguf_moe, moe_spec
from meshlm.architectures.selective_scan import GGUF_STATE, mamba_gguf, mamba_state, mamba_weights
from meshlm.architectures.weights import ExpertNames, transformer_weights
from meshlm.protocol.model import ModelSpec

_NORMS = (("input_layernorm", "attn_norm", "input_norm"), ("pre_ff_layernorm", "ffn_norm", "post_norm"))
_NAMES = ExpertNames(router="feed_forward.router", expert="feed_forward.experts.{}")


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = full_spec(config, architecture)
    layers = spec.num_hidden_layers
    attends = _every(config, "attn_layer", layers)
    experts = _every(config, "expert_layer", layers)
    if integer(config, "num_experts") > 1 and any(experts):
        spec = with_experts(spec, moe_spec(config, wide="intermediate_size"), experts)
    spec = with_states(spec, mamba_state(config, "weighted"), (not one for one in attends))
    return with_attention(spec, rotates=False)


def _every(config: dict[str, Any], name: str, layers: int) -> tuple[bool, ...]:
    """The layers that {name}_period and {name}_offset name. ValueError."""
    period, offset = integer(config, f"{name}_period"), integer(config, f"{name}_offset")
    if not 0 <= offset < period:
        raise ValueError(f"{name}_offset is {offset}; it must be below {name}_period {period}")
    return tuple(layer % period == offset for layer in range(layers))


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    metadata, attends = layers_that_attend(metadata)
    spec = dense_gguf(metadata, architecture)
    experts = [f"blk.{layer}.ffn_gate_inp.weight" in metadata.shapes for layer in range(spec.num_hidden_layers)]
    if any(experts):
        spec = with_experts(spec, gguf_moe(metadata), experts)
    if not all(attends):
        spec = with_states(spec, mamba_gguf(metadata, "weighted"), (not one for one in attends))
    return with_attention(spec, rotates=False)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    mlp = ("feed_forward", "ffn_{}", "mlp")
    return transformer_weights(spec, _NORMS, state=mamba_weights, mlp=mlp, experts=_NAMES)


def _renamed(name: str) -> str:
    return name.replace("model.final_layernorm.", "model.norm.")


FAMILY = Family(
    architecture="JambaForCausalLM",
    model_type="jamba",
    spec=_spec,
    weights=_weights,
    keys=words("""
        attn_layer_period attn_layer_offset expert_layer_period expert_layer_offset num_experts num_experts_per_tok
        mamba_d_state mamba_d_conv mamba_expand mamba_dt_rank mamba_conv_bias mamba_proj_bias use_mamba_kernels use_mambapy
        use_associative_scan num_logits_to_keep calc_logits_for_entire_prompt
    """),
    defaults={
        "num_key_value_heads": 8,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "max_position_embeddings": 262144,
    },
    rename=_renamed,
    gguf=GGUFFamily("jamba", _gguf, GGUF_KEYS | GGUF_STATE, experts=True),
    compiles=False,
    model="meshlm.workers.models.jamba:Jamba",
)
