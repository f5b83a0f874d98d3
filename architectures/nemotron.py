"""Nemotron and Minitron (Parmar et al. 2024): norms whose weights are stored as what they have more than 1; squared ReLU.

Nemotron-H and Nemotron 3 (NVIDIA 2025): each layer is a Mamba-2 mixer, attention without positions, an MLP with squared ReLU, or
experts of such MLPs, alone.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from meshlm.architectures import layer_norms, states, weights
from meshlm.architectures.config_values import integer, number, pairs, shown, words
from meshlm.architectures.deepseek import GGUF_EXPERT_KEYS, gguf_experts
from meshlm.architectures.dense import dense_gguf, full_spec, layers_that_attend
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, Weight
from meshlm.architectures.layers import checked, moe_spec
from meshlm.protocol.layers import Layers, LayerSpec, MoESpec, StateSpec
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_ORDER = LayerNormSpec()
NEMOTRON = layer_norms.LAYER_NORMS._replace(
    architecture="NemotronForCausalLM",
    model_type="nemotron",
    spec=partial(layer_norms.layer_norm_spec, order=_ORDER, eps="norm_eps"),
    weights=partial(layer_norms.layer_norm_weights, plus=1.0),
    keys=words("norm_eps"),
    defaults={"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5, "max_position_embeddings": 4096},
    gguf=layer_norms.layer_norm_form("nemotron", partial(layer_norms.layer_norm_gguf, order=_ORDER, act="relu2")),
)
_NAMES = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_expand": "expand",
    "mamba_chunk_size": "chunk_size",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",  # mamba_proj_bias stands in its files, and nobody reads it
}
_EPS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")  # of RMS norms, either
_LETTERS = {"M": "state", "*": "attention", "-": "mlp", "E": "moe"}
_KINDS = pairs("""
    mamba=state linear_attention=state attention=attention full_attention=attention mlp=mlp moe=moe
""")
_NAMES_OF_EXPERTS = weights.ExpertNames(router="mixer.gate", expert="mixer.experts.{}", shared="mixer.shared_experts")
_PACKED = {
    stem.replace("mamba.", "mixer."): tuple(one.replace("mamba.", "mixer.") for one in names)
    for stem, names in states.PACKED.items()
}


def _nemotron_h_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    for key, value in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if config.get(key, value) != value:
            raise ValueError(f"{key} {shown(config[key])} is not supported; supported: {value}")
    kinds = _kinds(config)
    config = {**config, "num_hidden_layers": len(kinds), "hidden_act": "silu"}
    spec = full_spec(config, architecture)
    state = states.mamba2_state(config, _NAMES, expands=False)
    experts = _moe(config) if "moe" in kinds else None
    return replace(
        spec,
        hidden_act="relu2",
        rms_norm_eps=number(config["layer_norm_epsilon"], "layer_norm_epsilon"),
        layers=_layers(spec, kinds, state, experts),
    )


def _layers(spec: ModelSpec, kinds: Iterable[str], state: StateSpec | None, experts: MoESpec | None) -> Layers:
    """A layer of each kind, which is one thing alone. spec: of layers that attend and have an MLP."""
    (both,) = spec.layers.kinds
    assert both.attention is not None
    records = {
        "state": LayerSpec(state=state),
        "attention": LayerSpec(attention=replace(both.attention, rotates=False)),
        "mlp": LayerSpec(mlp=both.mlp),
        "moe": LayerSpec(experts=experts),
    }
    return Layers.from_records(records[kind] for kind in kinds)


def _moe(config: dict[str, Any]) -> MoESpec:
    """Scored and chosen as DeepSeek-V3's. ValueError."""
    if config.get("moe_latent_size") is not None:
        raise ValueError(f"moe_latent_size {shown(config['moe_latent_size'])} is not supported")
    if config.get("mlp_bias"):
        raise ValueError("mlp_bias true is not supported where layers have experts")
    sizes = moe_spec(config, "n_routed_experts")
    return checked(
        replace(
            sizes,
            scoring_func="sigmoid",
            group_score="top2",
            correction_bias=True,
            gated=False,
            routed_scaling_factor=number(config["routed_scaling_factor"], "routed_scaling_factor"),
            n_group=integer(config, "n_group", 1),
            topk_group=integer(config, "topk_group", 1),
            shared_intermediate_size=integer(config, "moe_shared_expert_intermediate_size"),
        ),
        "n_routed_experts",
    )


def _nemotron_h_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """The layers that attend have key-value heads, those with an MLP or experts columns, and the others have states. MetadataError."""
    key = f"{metadata.kind}.feed_forward_length"
    metadata, attends = layers_that_attend(metadata)
    wide = metadata.get("feed_forward_length")
    wide = [int(size) for size in wide] if isinstance(wide, list) else [int(wide)] * len(attends)
    if len(wide) != len(attends) or len(set(wide) - {0}) > 1 or any(map(all, zip(wide, attends, strict=False))):
        raise MetadataError(
            f"metadata {key} is {shown(wide)}; it must be 0 or one number by layer, and 0 where layers attend"
        )
    metadata = metadata._replace(fields={**metadata.fields, key: max(wide)})
    eps = next((eps for eps in _EPS if f"{metadata.kind}.{eps}" in metadata.fields), _EPS[0])
    spec, experts = dense_gguf(metadata, architecture, eps), None
    routed = [f"blk.{layer}.ffn_gate_inp.weight" in metadata.shapes for layer in range(len(wide))]
    if any(routed):
        shared = int(metadata.get("expert_shared_feed_forward_length", 0))
        experts = gguf_experts(metadata, plain=2, gated=False, shared_intermediate_size=shared)
    kinds = [
        "attention" if one else "moe" if size and chooses else "mlp" if size else "state"
        for one, size, chooses in zip(attends, wide, routed, strict=False)
    ]
    state = replace(states.mamba2_gguf(metadata), dtype="float32") if "state" in kinds else None
    layers = _layers(spec, kinds, state, experts)
    return replace(spec, hidden_act="relu2", mlp_bias=metadata.has("ffn_up.bias"), layers=layers)


def _kinds(config: dict[str, Any]) -> tuple[str, ...]:
    letters = config.get("hybrid_override_pattern")
    if letters is None:
        given = config.get("layers_block_type") or config.get("layer_types") or []
        return states.layers_of({**config, "num_hidden_layers": len(given)}, _KINDS)
    if not isinstance(letters, str) or not letters:
        raise ValueError(f"hybrid_override_pattern must be the letter of each layer, got {shown(letters)}")
    for layer, letter in enumerate(letters):
        if letter not in _LETTERS:
            raise ValueError(
                f"hybrid_override_pattern holds {shown(letter)} for layer {layer}; supported: {', '.join(_LETTERS)}"
            )
    return tuple(_LETTERS[letter] for letter in letters)


def _nemotron_h_weights(spec: ModelSpec) -> Iterator[Weight]:
    hidden = spec.hidden_size

    def experts(moe: MoESpec) -> Iterator[Weight]:
        yield from weights.expert_weights(spec, replace(moe, shared_intermediate_size=0), _NAMES_OF_EXPERTS)
        if moe.shared_intermediate_size:
            names = ("mixer.shared_experts", "ffn_{}_shexp", "mlp.shared")
            yield from weights.ungated_weights(spec, moe.shared_intermediate_size, names)

    def in_layer(layer: LayerSpec) -> Iterator[Weight]:
        if layer.experts is not None:
            yield from experts(layer.experts)
        if layer.mlp is not None:
            yield from weights.ungated_weights(spec, layer.intermediate_size, ("mixer", "ffn_{}", "mlp"))
        for weight in weights.attention_weights(spec, layer) if layer.attention else ():
            yield weight._replace(name=weight.name.replace("self_attn.", "mixer."))
        for weight in states.mamba2_weights(spec) if layer.state else ():
            yield weight._replace(name=weight.name.replace("mamba.", "mixer."))
        norm = "post_norm" if layer.experts or layer.mlp else "input_norm"
        yield Weight("norm.weight", "attn_norm.weight", f"{norm}.weight", (hidden,))

    return weights.decoder_weights(spec, in_layer)


def _renamed(name: str) -> str:
    name = name.replace("backbone.", "model.", 1) if name.startswith("backbone.") else name
    return name.replace("model.embeddings.", "model.embed_tokens.").replace("model.norm_f.", "model.norm.")


NEMOTRON_H = Family(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    spec=_nemotron_h_spec,
    weights=_nemotron_h_weights,
    keys=frozenset(_NAMES.values())
    | words("""
        hybrid_override_pattern layers_block_type mlp_hidden_act mamba_hidden_act layer_norm_epsilon time_step_limit time_step_min
        time_step_max time_step_floor mamba_proj_bias mamba_ssm_cache_dtype use_mamba_kernels residual_in_fp32
        rescale_prenorm_residual use_bias num_logits_to_keep mtp_layers_block_type mtp_hybrid_override_pattern attention_head_dim
        n_routed_experts n_shared_experts moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size
        moe_shared_expert_overlap num_experts_per_tok routed_scaling_factor n_group topk_group norm_topk_prob
        num_nextn_predict_layers
    """),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 52, "max_position_embeddings": 4096}
    | {"layer_norm_epsilon": 1e-5}
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688}
    | {"moe_shared_expert_intermediate_size": 7688, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
    | {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
    | {"chunk_size": 128, "mamba_ssm_cache_dtype": "float32"},
    packed={
        **_PACKED,
        **{f"mixer.experts.{name}": (f"mixer.experts.{{}}.{name}",) for name in ("up_proj", "down_proj")},
    },
    rename=_renamed,
    gguf=GGUFFamily(
        "nemotron_h",
        _nemotron_h_gguf,
        states.GGUF_STATE | GGUF_EXPERT_KEYS | set(_EPS) | {"expert_shared_feed_forward_length"},
        packed=states.GGUF_PACKED,
    ),
    unread=r"(model\.)?mtp\..*",
    model="meshlm.workers.models.hybrid:NemotronH",
)
FAMILIES = (NEMOTRON, NEMOTRON_H)
