"""Bamba (IBM 2024): Mamba-2 layers, a few with attention between them, and an MLP in each.
Falcon-H1 (TII 2025): attention and Mamba-2 beside one another in each layer, over one norm and into one sum; numbers multiply both.
They are multiplied into the weights while these load, so one product makes the inputs of both, and one takes their outputs.

Jamba (AI21 2024): Mamba layers, every eighth with attention without positions, and experts in every other.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from meshlm.architectures import weights
from meshlm.architectures.config_values import integer, number, refuse_quantised, shown, words
from meshlm.architectures.dense import dense_gguf, dense_spec, full_spec, layers_that_attend
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, Weight
from meshlm.architectures.granite import MULTIPLIED
from meshlm.architectures.layers import GGUF_KEYS, gguf_moe, moe_spec, with_attention, with_experts, with_states
from meshlm.architectures.states import (
    GGUF_MAMBA_STATE,
    GGUF_PACKED,
    GGUF_STATE,
    KEYS,
    MODEL,
    PACKED,
    mamba2_gguf,
    mamba2_state,
    mamba2_weights,
    mamba_gguf,
    mamba_state,
    mamba_weights,
)
from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec

_NORMS = (("input_layernorm", "attn_norm", "input_norm"), ("pre_ff_layernorm", "ffn_norm", "post_norm"))
_MLP = ("feed_forward", "ffn_{}", "mlp")


def _bamba_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = full_spec(config, architecture)
    layers, given = spec.num_hidden_layers, config.get("attn_layer_indices") or []
    if not isinstance(given, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in given):
        raise ValueError(f"attn_layer_indices must be numbers of layers below {layers}, got {shown(given)}")
    states = [layer not in given for layer in range(layers)]
    return with_states(spec, mamba2_state(config), states) if any(states) else spec


def _renamed(name: str) -> str:
    return name.replace("model.final_layernorm.", "model.norm.")


BAMBA = Family(
    architecture="BambaForCausalLM",
    model_type="bamba",
    spec=_bamba_spec,
    weights=partial(weights.transformer_weights, norms=_NORMS, state=mamba2_weights, mlp=_MLP),
    keys=KEYS | words("attn_layer_indices attn_rotary_emb num_logits_to_keep z_loss_coefficient"),
    defaults={"partial_rotary_factor": 0.5, "max_position_embeddings": 262144, "num_key_value_heads": 8}
    | {"rms_norm_eps": 1e-5, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_expand": 2},
    packed=PACKED,
    rename=_renamed,
    model=MODEL,
)
_ONE = words("""
    embedding_multiplier lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier
    ssm_in_multiplier ssm_out_multiplier
""")
_SEVERAL = {"mlp_multipliers": 2, "ssm_multipliers": 5}  # of gate and down; of z, x, B, C and dt
_BIASES = ("attention_bias", "projectors_bias", "mamba_proj_bias", "mlp_bias")


def _falcon_h1_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    refuse_quantised(config, architecture, MULTIPLIED)
    for key in _BIASES:
        if config.get(key):
            raise ValueError(f"{key} is not supported for {architecture}")
    spec = dense_spec(config, architecture)
    inner = config.get("mamba_d_ssm")
    heads = integer(config, "mamba_n_heads")
    if inner is not None:
        each = config.get("mamba_d_head", "auto")
        if heads < 1 or integer(config, "mamba_d_ssm") != heads * (inner // heads if each in (None, "auto") else each):
            raise ValueError(f"mamba_d_ssm {shown(inner)} is not mamba_n_heads {heads} heads of {shown(each)}")
        config = {**config, "mamba_d_head": inner // heads}
    state = replace(
        mamba2_state(config, expands=inner is None),
        gated_norm=bool(config.get("mamba_rms_norm")),
        norm_before_gate=config.get("mamba_norm_before_gate") is not False,
    )
    return replace(
        spec.with_layers(lambda layer: replace(layer, state=state)),
        multipliers=_multipliers(config),
        logit_scale=_logit_scale(config, tied=spec.tie_word_embeddings),
    )


def _falcon_h1_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """A file's weights have been multiplied already."""
    spec = dense_gguf(metadata, architecture)
    if spec.tie_word_embeddings:
        raise MetadataError("tensor output.weight is missing: a file without it has no multiplier of logits")
    state = mamba2_gguf(metadata)
    return replace(
        spec.with_layers(lambda layer: replace(layer, state=state)),
        multipliers=(1.0,) * (len(_ONE) + sum(_SEVERAL.values())),
    )


def _multipliers(config: dict[str, Any]) -> tuple[float, ...]:
    """By name: _ONE in the order of the alphabet, then _SEVERAL. ValueError."""
    found = [_number(config[key], key) for key in sorted(_ONE)]
    for key, count in _SEVERAL.items():
        given = config.get(key) or [1.0] * count
        if not isinstance(given, list | tuple) or len(given) != count:
            raise ValueError(f"{key} must be {count} numbers, got {shown(given)}")
        found += [_number(one, key) for one in given]
    return tuple(found)


def _number(value: Any, key: str) -> float:
    return 1.0 if value is None else number(value, key)


def _logit_scale(config: dict[str, Any], *, tied: bool) -> float:
    embedding, head = (_number(config[key], key) for key in ("embedding_multiplier", "lm_head_multiplier"))
    if not embedding:
        raise ValueError("embedding_multiplier is 0; it must be positive")
    return head / embedding if tied else head


def _falcon_h1_weights(spec: ModelSpec) -> Iterator[Weight]:
    assert spec.state is not None
    names = sorted(_ONE)
    of, rest = dict(zip(names, spec.multipliers, strict=False)), spec.multipliers[len(names) :]
    (gate, down), rows = rest[:2], rest[2:]
    attention, states = of["attention_in_multiplier"], of["ssm_in_multiplier"]
    times = {
        "model.embed_tokens.weight": of["embedding_multiplier"],
        "self_attn.q_proj.weight": attention,
        "self_attn.k_proj.weight": attention * of["key_multiplier"],
        "self_attn.v_proj.weight": attention,
        "self_attn.o_proj.weight": of["attention_out_multiplier"],
        "mamba.out_proj.weight": of["ssm_out_multiplier"],
        "feed_forward.gate_proj.weight": gate,
        "feed_forward.down_proj.weight": down,
    }
    times |= {f"mamba.{name}_proj.weight": states * one for name, one in zip("zxbc", rows, strict=False)}
    times["mamba.dt_proj.weight"] = states * rows[4]

    def in_layer(layer: LayerSpec) -> Iterator[Weight]:
        for weight in (*weights.attention_weights(spec, layer), *mamba2_weights(spec)):
            last = weight.parameter == "attention.o.weight"
            yield weight._replace(beside=last, quantises=weight.quantises and not last)
        yield from weights.mlp_weights(spec, layer.intermediate_size, _MLP)
        for weight in weights.norm_weights(spec, layer, _NORMS):
            yield weight._replace(gguf=weight.gguf.replace("ffn_norm.weight", "ffn_norm"))

    for weight in weights.decoder_weights(spec, in_layer):
        name = weight.name if weight.layer is None else weight.name.partition(f".{weight.layer}.")[2]
        yield weight._replace(times=times.get(name, 1.0))


FALCON_H1 = Family(
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    spec=_falcon_h1_spec,
    weights=_falcon_h1_weights,
    keys=KEYS
    | _ONE
    | words("""
        mlp_multipliers ssm_multipliers mamba_d_ssm mamba_rms_norm mamba_norm_before_gate mamba_use_mlp projectors_bias
        num_logits_to_keep
    """),
    defaults=dict.fromkeys(_ONE, 1.0)
    | {"max_position_embeddings": 8192, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    | {"mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_expand": 2},
    packed=PACKED,
    rename=_renamed,
    gguf=GGUFFamily("falcon-h1", _falcon_h1_gguf, GGUF_STATE, packed=GGUF_PACKED),
    model="meshlm.workers.models.hybrid:FalconH1",
)
_NAMES = weights.ExpertNames(router="feed_forward.router", expert="feed_forward.experts.{}")


def _jamba_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
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


def _jamba_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    metadata, attends = layers_that_attend(metadata)
    spec = dense_gguf(metadata, architecture)
    experts = [f"blk.{layer}.ffn_gate_inp.weight" in metadata.shapes for layer in range(spec.num_hidden_layers)]
    if any(experts):
        spec = with_experts(spec, gguf_moe(metadata), experts)
    if not all(attends):
        spec = with_states(spec, mamba_gguf(metadata, "weighted"), (not one for one in attends))
    return with_attention(spec, rotates=False)


JAMBA = Family(
    architecture="JambaForCausalLM",
    model_type="jamba",
    spec=_jamba_spec,
    weights=partial(weights.transformer_weights, norms=_NORMS, state=mamba_weights, mlp=_MLP, experts=_NAMES),
    keys=words("""
        attn_layer_period attn_layer_offset expert_layer_period expert_layer_offset num_experts num_experts_per_tok
        mamba_d_state mamba_d_conv mamba_expand mamba_dt_rank mamba_conv_bias mamba_proj_bias use_mamba_kernels use_mambapy
        use_associative_scan num_logits_to_keep calc_logits_for_entire_prompt
    """),
    defaults={"num_key_value_heads": 8, "attn_layer_period": 8, "attn_layer_offset": 4}
    | {"max_position_embeddings": 262144}
    | {"num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
    | {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    rename=_renamed,
    gguf=GGUFFamily("jamba", _jamba_gguf, GGUF_KEYS | GGUF_MAMBA_STATE, experts=True),
    model="meshlm.workers.models.hybrid:Jamba",
)
FAMILIES = (BAMBA, FALCON_H1, JAMBA)
