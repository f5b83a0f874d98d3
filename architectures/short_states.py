"""LFM2 (Liquid AI 2025): short convolutions between two gates, and attention in some layers; the state is the last inputs alone.
LFM2-MoE (Liquid AI 2025): the same, with experts that are scored by sigmoids behind some dense layers.

RecurrentGemma (Botev et al. 2024), of the Griffin architecture (De et al. 2024): two layers in three keep the state of a real-gated
linear recurrent unit, the third has a window.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, number, positive, shown, words
from meshlm.architectures.deepseek import GGUF_EXPERT_KEYS, with_gguf_experts
from meshlm.architectures.dense import activation, dense_gguf, dense_spec, layers_that_attend
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, Split, Weight
from meshlm.architectures.layers import moe_spec, with_attention, with_experts, with_states
from meshlm.architectures.states import layers_of
from meshlm.architectures.weights import ExpertNames, Norms, columns, rows, transformer_weights
from meshlm.protocol.layers import StateSpec
from meshlm.protocol.model import ModelSpec

_NORMS = (("operator_norm", "attn_norm", "input_norm"), ("ffn_norm", "ffn_norm", "post_norm"))
_KINDS = {"conv": "state", "full_attention": "attention"}
_PARTS = ("b", "c", "x")  # of in_proj: the gate before the convolution, the one behind it, and what is convolved
_CONV = "shortconv"  # llama.cpp's name
_LFM2_EXPERTS = ExpertNames("feed_forward.gate", "feed_forward.experts.{}", "w1", "w3", "w2")
_FFN = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def _lfm2_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    layers = integer(config, "num_hidden_layers")
    kernel = integer(config, "conv_L_cache")
    if kernel < 2:
        raise ValueError(f"conv_L_cache is {kernel}; it must be two or more")
    wide = {"hidden_act": "silu", "intermediate_size": _intermediate(config), "rms_norm_eps": config["norm_eps"]}
    config = {**config, **wide, "tie_word_embeddings": config.get("tie_embedding", config["tie_word_embeddings"])}
    attends = tuple(kind == "attention" for kind in _kinds(config, layers))
    return _with_states(dense_spec(config, architecture), attends, kernel, bias=boolean(config, "conv_bias"))


def _with_states(spec: ModelSpec, attends: tuple[bool, ...], kernel: int, *, bias: bool) -> ModelSpec:
    state = StateSpec(
        kind="short_conv",
        num_heads=spec.hidden_size,
        head_dim=1,
        state_size=0,
        n_groups=spec.hidden_size,  # ranks split the channels as they like
        conv_kernel=kernel,
        conv_bias=bias,
        proj_bias=bias,
    )
    return with_states(replace(spec, qk_norm=True), state, (not one for one in attends))


def _intermediate(config: dict[str, Any]) -> int:
    """Columns of an MLP: the file gives a number that they are computed from. ValueError."""
    given = config.get("block_ff_dim")
    wide = integer(config, "intermediate_size") if given is None else integer(config, "block_ff_dim")
    if config.get("block_auto_adjust_ff_dim") is False:
        return wide
    multiple, factor = positive(config, "block_multiple_of"), config.get("block_ffn_dim_multiplier")
    wide = int(2 * wide / 3)
    if factor is None:
        return wide
    return -(-int(number(factor, "block_ffn_dim_multiplier") * wide) // multiple) * multiple


def _kinds(config: dict[str, Any], layers: int) -> tuple[str, ...]:
    if config.get("layer_types") is not None:
        return layers_of(config, _KINDS)
    given = config.get("full_attn_idxs")
    if given is None:
        return ("attention",) * layers
    if not isinstance(given, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in given):
        raise ValueError(f"full_attn_idxs must be numbers of layers below {layers}, got {shown(given)}")
    return tuple("attention" if layer in given else "state" for layer in range(layers))


def _lfm2_mixer(spec: ModelSpec) -> Iterator[Weight]:
    state = spec.state
    assert state is not None
    hidden, wide = spec.hidden_size, Split.INTERMEDIATE
    out = (hidden, hidden)
    for part in _PARTS:
        stem, gguf = f"conv.{part}_proj", f"{_CONV}.{part}_proj"
        yield from columns(stem, gguf, "attention.qkv", out, wide, bias=state.proj_bias)
    taps = (hidden, 1, state.conv_kernel)
    yield from columns("conv.conv", "shortconv.conv", "attention.conv", taps, wide, bias=state.conv_bias)
    yield from rows("conv.out_proj", "shortconv.out_proj", "attention.o", out, wide, bias=state.proj_bias)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    names = ("feed_forward", "ffn_{}", "mlp")
    for weight in transformer_weights(spec, _NORMS, state=_lfm2_mixer, mlp=names, experts=_LFM2_EXPERTS):
        yield weight._replace(gguf="token_embd_norm.weight") if weight.parameter == "norm.weight" else weight


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    kernel = int(metadata.get("shortconv.l_cache"))
    metadata, attends = layers_that_attend(metadata)
    spec = dense_gguf(metadata, architecture)
    if kernel < 2:
        raise MetadataError(f"metadata {metadata.kind}.shortconv.l_cache is {kernel}; it must be two or more")
    return _with_states(spec, attends, kernel, bias=False)


def _lfm2_renamed(name: str) -> str:
    name = name.replace("model.embedding_norm.", "model.norm.").replace("self_attn.out_proj.", "self_attn.o_proj.")
    name = re.sub(r"self_attn\.([qk])_layernorm\.", r"self_attn.\1_norm.", name)
    name = name.replace("feed_forward.expert_bias", "feed_forward.gate.e_score_correction_bias")
    return re.sub(r"feed_forward\.(w[123])\.", lambda found: f"feed_forward.{_FFN[found[1]]}.", name)


_LFM2_GGUF = GGUFFamily(
    "lfm2",
    _gguf,
    words("shortconv.l_cache"),
    packed={f"{_CONV}.in_proj": tuple(f"{_CONV}.{part}_proj" for part in _PARTS)},
)
LFM2 = Family(
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    spec=_lfm2_spec,
    weights=_weights,
    keys=words("""
        norm_eps conv_bias conv_L_cache block_multiple_of block_ffn_dim_multiplier block_auto_adjust_ff_dim block_ff_dim
        full_attn_idxs tie_embedding conv_dim conv_dim_out conv_use_xavier_init block_dim block_mlp_init_scale block_norm_eps
        block_out_init_scale block_use_swiglu block_use_xavier_init num_heads theta use_pos_enc
    """),
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "max_position_embeddings": 128000}
    | {"norm_eps": 1e-5, "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    | {"tie_word_embeddings": True},
    packed={"conv.in_proj": tuple(f"conv.{part}_proj" for part in _PARTS)},
    gguf=_LFM2_GGUF,
    rename=_lfm2_renamed,
    model="meshlm.workers.models.hybrid:Lfm2",
)
_FIXED = {"block_auto_adjust_ff_dim": False, "block_ff_dim": None}  # the MLPs' width is what the file says


def _lfm2_moe_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec, first = _lfm2_spec({**config, **_FIXED}, architecture), integer(config, "num_dense_layers")
    moe = replace(
        moe_spec(config),
        scoring_func="sigmoid",
        correction_bias=boolean(config, "use_expert_bias"),
        routed_scaling_factor=number(config["routed_scaling_factor"], "routed_scaling_factor"),
    )
    if first < 0:
        raise ValueError(f"num_dense_layers is {first}; it must not be negative")
    return with_experts(spec, moe, (layer >= first for layer in range(spec.num_hidden_layers)))


def _moe_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return with_gguf_experts(metadata, _gguf(metadata, architecture), plain=2, norm_topk_prob=True, group_score="max")


LFM2_MOE = LFM2._replace(
    architecture="Lfm2MoeForCausalLM",
    model_type="lfm2_moe",
    spec=_lfm2_moe_spec,
    keys=words("""
        norm_eps conv_bias conv_L_cache tie_embedding num_dense_layers num_experts num_experts_per_tok moe_intermediate_size
        use_expert_bias routed_scaling_factor norm_topk_prob
    """),
    defaults={**LFM2.defaults, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 1792, "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
    gguf=_LFM2_GGUF._replace(kind="lfm2moe", spec=_moe_gguf, keys=_LFM2_GGUF.keys | GGUF_EXPERT_KEYS, experts=True),
)
_GEMMA_NORMS: Norms = (("temporal_pre_norm", "", "input_norm"), ("channel_pre_norm", "", "post_norm"))
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _recurrent_gemma_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    if not boolean(config, "embeddings_scale_by_sqrt_dim"):
        raise ValueError(f"embeddings_scale_by_sqrt_dim false is not supported for {architecture}")
    wide, kernel = integer(config, "intermediate_size"), integer(config, "conv1d_width")
    window, channels = (
        positive(config, "attention_window_size"),
        positive(config, "lru_width", integer(config, "hidden_size")),
    )
    if kernel < 2:
        raise ValueError(f"conv1d_width is {kernel}; it must be two or more")
    act = activation(config, "hidden_activation")
    spec = dense_spec({**config, "hidden_act": act, "intermediate_size": wide // 2, "mlp_bias": True}, architecture)
    if channels % spec.num_attention_heads:
        raise ValueError(f"lru_width {channels} is no multiple of num_attention_heads {spec.num_attention_heads}")
    state = StateSpec(
        kind="mamba",
        num_heads=channels,
        head_dim=1,
        state_size=1,
        n_groups=spec.num_attention_heads,  # blocks of the gates' matrices, which ranks do not split
        conv_kernel=kernel,
        proj_bias=True,
        dtype="float32",
    )
    spec = with_states(with_attention(spec, sliding_window=window), state, _recurrent(config, spec.num_hidden_layers))
    cap = number(config["logits_soft_cap"] or 0.0, "logits_soft_cap")
    return replace(spec, output_bias=True, final_logit_softcapping=cap)


def _recurrent(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers keep a state: block_types names kinds that repeat. ValueError."""
    kinds = config["block_types"]
    if not isinstance(kinds, list | tuple) or not kinds or not set(map(str, kinds)) <= {"recurrent", "attention"}:
        raise ValueError(f"block_types must name kinds of layers, recurrent or attention, got {shown(kinds)}")
    return tuple(kinds[layer % len(kinds)] == "recurrent" for layer in range(layers))


def _recurrent_gemma_mixer(spec: ModelSpec) -> Iterator[Weight]:
    state, heads, hidden, wide = spec.state, spec.num_attention_heads, spec.hidden_size, Split.INTERMEDIATE
    assert state is not None
    channels, block = state.inner, state.inner // heads
    for name in ("y", "x"):
        yield from columns(f"linear_{name}", "", "attention.qkv", (channels, hidden), wide, bias=True)
    yield from columns("conv_1d", "", "attention.conv", (channels, 1, state.conv_kernel), wide, bias=True)
    for gate in ("input_gate", "recurrent_gate"):
        yield Weight(f"rg_lru.{gate}_weight", "", f"attention.{gate}.weight", (heads, block, block), wide)
        yield Weight(f"rg_lru.{gate}_bias", "", f"attention.{gate}.bias", (heads, block), wide)
    yield Weight("rg_lru.recurrent_param", "", "attention.decay", (channels,), wide)
    yield from rows("linear_out", "", "attention.o", (hidden, channels), wide, bias=True)


def _recurrent_gemma_renamed(name: str) -> str:
    name = name.replace("model.final_norm.", "model.norm.").replace(".mlp_block.", ".mlp.")
    stem, block, rest = name.partition(".temporal_block.")
    if not block:
        return name
    return f"{stem}.self_attn.{rest}" if rest.startswith(_ATTENTION) else f"{stem}.{rest}"


RECURRENT_GEMMA = Family(
    architecture="RecurrentGemmaForCausalLM",
    model_type="recurrent_gemma",
    spec=_recurrent_gemma_spec,
    weights=partial(transformer_weights, norms=_GEMMA_NORMS, norm_plus=1.0, state=_recurrent_gemma_mixer),
    keys=words("""
        lru_width attention_window_size conv1d_width logits_soft_cap hidden_activation block_types _block_types
        w_init_variance_scale final_w_init_variance_scale embeddings_scale_by_sqrt_dim
    """),
    defaults={"num_hidden_layers": 26, "num_attention_heads": 10, "max_position_embeddings": 1 << 20}
    | {"attention_window_size": 2048, "partial_rotary_factor": 0.5}
    | {"vocab_size": 256000, "hidden_size": 2560, "intermediate_size": 7680, "conv1d_width": 4}
    | {"logits_soft_cap": 30.0, "hidden_activation": "gelu_pytorch_tanh"}
    | {"block_types": ["recurrent", "recurrent", "attention"], "embeddings_scale_by_sqrt_dim": True}
    | {"tie_word_embeddings": True},
    rename=_recurrent_gemma_renamed,
    float16=False,
    model="meshlm.workers.models.recurrent_gemma:RecurrentGemma",
)
FAMILIES = (LFM2, LFM2_MOE, RECURRENT_GEMMA)
