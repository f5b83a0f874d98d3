"""Jamba (AI21 2024): Mamba layers, every eighth with attention without positions, and experts in every other."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, words
from meshlm.architectures.dense import (
    attention_weights,
    decoder_weights,
    dense_gguf,
    dense_spec,
    layers_that_attend,
    mlp_weights,
    norm_weights,
    one_window,
)
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.moe import GGUF_KEYS, ExpertNames, expert_weights, gguf_moe, moe_spec
from meshlm.architectures.selective_scan import GGUF_STATE, mamba_gguf, mamba_state, mamba_weights
from meshlm.protocol.model import ModelSpec

_NORMS = (("input_layernorm", "attn_norm", "input_norm"), ("pre_ff_layernorm", "ffn_norm", "post_norm"))
_NAMES = ExpertNames(router="feed_forward.router", expert="feed_forward.experts.{}")


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = dense_spec(config, architecture)
    one_window(config, spec, slides=False)
    layers = spec.num_hidden_layers
    attends = _every(config, "attn_layer", layers)
    experts = _every(config, "expert_layer", layers)
    state, moe = mamba_state(config, tuple(not one for one in attends), "weighted"), None
    if integer(config, "num_experts") > 1 and any(experts):
        moe = replace(moe_spec(config, wide="intermediate_size"), moe_layers=() if all(experts) else experts)
    return replace(
        spec,
        moe=moe,
        attention_layers=attends,
        state=None if all(attends) else state,
        no_rope_layers=(True,) * layers,
    )


def _every(config: dict[str, Any], name: str, layers: int) -> tuple[bool, ...]:
    """The layers that {name}_period and {name}_offset name. ValueError."""
    period, offset = integer(config, f"{name}_period"), integer(config, f"{name}_offset")
    if not 0 <= offset < period:
        raise ValueError(f"{name}_offset is {offset}; it must be below {name}_period {period}")
    return tuple(layer % period == offset for layer in range(layers))


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    metadata, attends = layers_that_attend(metadata)
    spec, moe = dense_gguf(metadata, architecture), None
    layers = spec.num_hidden_layers
    experts = tuple(f"blk.{layer}.ffn_gate_inp.weight" in metadata.shapes for layer in range(layers))
    if any(experts):
        moe = replace(gguf_moe(metadata), moe_layers=() if all(experts) else experts)
    return replace(
        spec,
        moe=moe,
        attention_layers=attends,
        state=None if all(attends) else mamba_gguf(metadata, tuple(not one for one in attends), "weighted"),
        no_rope_layers=(True,) * layers,
    )


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    def in_layer(layer: int) -> Iterator[Weight]:
        yield from attention_weights(spec) if spec.has_attention(layer) else mamba_weights(spec)
        if spec.has_experts(layer):
            yield from expert_weights(spec, _NAMES)
        else:
            yield from mlp_weights(spec, spec.intermediate_size, ("feed_forward", "ffn_{}", "mlp"))
        yield from norm_weights(spec, _NORMS)

    return decoder_weights(spec, in_layer)


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
