"""Nemotron-H (NVIDIA 2025): each layer is a Mamba-2 mixer, attention without positions, or an MLP with squared ReLU, alone."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import number, shown, words
from meshlm.architectures.dense import attention_weights, decoder_weights, dense_spec, one_window
from meshlm.architectures.family import Family, Split, Weight
from meshlm.architectures.states import PACKED, layers_of, mamba2_state, mamba2_weights
from meshlm.protocol.model import ModelSpec

_NAMES = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_chunk_size": "chunk_size",
    "mamba_conv_bias": "use_conv_bias",
}
_LETTERS = {"M": "state", "*": "attention", "-": "mlp"}
_KINDS = {
    "mamba": "state",
    "linear_attention": "state",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
}

_PACKED = {
    stem.replace("mamba.", "mixer."): tuple(one.replace("mamba.", "mixer.") for one in names)
    for stem, names in PACKED.items()
}


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    for key, value in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if config.get(key, value) != value:
            raise ValueError(f"{key} {shown(config[key])} is not supported; supported: {value}")
    kinds = _kinds(config)
    config = {**config, "num_hidden_layers": len(kinds), "hidden_act": "silu"}
    spec = dense_spec(config, architecture)
    one_window(config, spec, slides=False)
    states = tuple(kind == "state" for kind in kinds)
    state = mamba2_state(config, states, _NAMES, expands=False)
    return replace(
        spec,
        hidden_act="relu2",
        rms_norm_eps=number(config["layer_norm_epsilon"], "layer_norm_epsilon"),
        attention_layers=tuple(kind == "attention" for kind in kinds),
        mlp_layers=tuple(kind == "mlp" for kind in kinds),
        state=state if any(states) else None,
        no_rope_layers=(True,) * len(kinds),
    )


def _kinds(config: dict[str, Any]) -> tuple[str, ...]:
    """The kind of each layer. ValueError."""
    letters = config.get("hybrid_override_pattern")
    if letters is None:
        given = config.get("layers_block_type") or config.get("layer_types") or []
        return layers_of({**config, "num_hidden_layers": len(given)}, _KINDS)
    if not isinstance(letters, str) or not letters:
        raise ValueError(f"hybrid_override_pattern must be the letter of each layer, got {shown(letters)}")
    for layer, letter in enumerate(letters):
        if letter not in _LETTERS:
            raise ValueError(
                f"hybrid_override_pattern holds {shown(letter)} for layer {layer}; supported: {', '.join(_LETTERS)}"
            )
    return tuple(_LETTERS[letter] for letter in letters)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    hidden, wide = spec.hidden_size, spec.intermediate_size

    def mlp() -> Iterator[Weight]:
        split = Split.INTERMEDIATE
        yield Weight("mixer.up_proj.weight", "", "mlp.up.weight", (wide, hidden), split)
        yield Weight("mixer.down_proj.weight", "", "mlp.down.weight", (hidden, wide), split, dim=1)
        if spec.mlp_bias:
            yield Weight("mixer.up_proj.bias", "", "mlp.up.bias", (wide,), split)
            yield Weight("mixer.down_proj.bias", "", "mlp.down.bias", (hidden,), Split.FIRST_RANK)

    def in_layer(layer: int) -> Iterator[Weight]:
        if spec.has_mlp(layer):
            yield from mlp()
        for weight in attention_weights(spec) if spec.has_attention(layer) else ():
            yield weight._replace(name=weight.name.replace("self_attn.", "mixer."))
        for weight in mamba2_weights(spec) if spec.has_state(layer) else ():
            yield weight._replace(name=weight.name.replace("mamba.", "mixer."))
        norm = "post_norm" if spec.has_mlp(layer) else "input_norm"
        yield Weight("norm.weight", "", f"{norm}.weight", (hidden,))

    return decoder_weights(spec, in_layer)


def _renamed(name: str) -> str:
    name = name.replace("backbone.", "model.", 1) if name.startswith("backbone.") else name
    return name.replace("model.embeddings.", "model.embed_tokens.").replace("model.norm_f.", "model.norm.")


FAMILY = Family(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    spec=_spec,
    weights=_weights,
    keys=frozenset(_NAMES.values())
    | words("""
        hybrid_override_pattern layers_block_type mlp_hidden_act mamba_hidden_act layer_norm_epsilon time_step_limit time_step_min
        time_step_max time_step_floor mamba_proj_bias mamba_ssm_cache_dtype use_mamba_kernels residual_in_fp32
        rescale_prenorm_residual use_bias num_logits_to_keep mtp_layers_block_type mtp_hybrid_override_pattern attention_head_dim
        n_routed_experts n_shared_experts moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size
        moe_shared_expert_overlap num_experts_per_tok routed_scaling_factor n_group topk_group norm_topk_prob
        num_nextn_predict_layers
    """),
    defaults={
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "chunk_size": 128,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "layer_norm_epsilon": 1e-5,
        "num_hidden_layers": 52,
        "max_position_embeddings": 4096,
        "mamba_ssm_cache_dtype": "float32",
    },
    packed=_PACKED,
    rename=_renamed,
    compiles=False,
    model="meshlm.workers.models.hybrid:NemotronH",
)
