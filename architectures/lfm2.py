"""LFM2 (Liquid AI 2025): short convolutions between two gates, and attention in some layers; the state is the last inputs alone."""

import re
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, number, positive, shown, words
from meshlm.architectures.dense import dense_gguf, dense_spec, layers_that_attend
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, Split, Weight
from meshlm.architectures.layers import with_states
from meshlm.architectures.states import layers_of
from meshlm.architectures.weights import columns, rows, transformer_weights
from meshlm.protocol.layers import StateSpec
from meshlm.protocol.model import ModelSpec

_NORMS = (("operator_norm", "attn_norm", "input_norm"), ("ffn_norm", "ffn_norm", "post_norm"))
_KINDS = {"conv": "state", "full_attention": "attention"}
_PARTS = ("b", "c", "x")  # of in_proj: the gate before the convolution, the one behind it, and what is convolved
_CONV = "shortconv"  # llama.cpp's name
_FFN = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
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


def _mixer(spec: ModelSpec) -> Iterator[Weight]:
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
    for weight in transformer_weights(spec, _NORMS, state=_mixer, mlp=("feed_forward", "ffn_{}", "mlp")):
        yield weight._replace(gguf="token_embd_norm.weight") if weight.parameter == "norm.weight" else weight


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    kernel = int(metadata.get("shortconv.l_cache"))
    metadata, attends = layers_that_attend(metadata)
    spec = dense_gguf(metadata, architecture)
    if kernel < 2:
        raise MetadataError(f"metadata lfm2.shortconv.l_cache is {kernel}; it must be two or more")
    return _with_states(spec, attends, kernel, bias=False)


def _renamed(name: str) -> str:
    name = name.replace("model.embedding_norm.", "model.norm.").replace("self_attn.out_proj.", "self_attn.o_proj.")
    name = re.sub(r"self_attn\.([qk])_layernorm\.", r"self_attn.\1_norm.", name)
    return re.sub(r"feed_forward\.(w[123])\.", lambda found: f"feed_forward.{_FFN[found[1]]}.", name)


FAMILY = Family(
    architecture="Lfm2ForCausalLM",
    model_type="lfm2",
    spec=_spec,
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
    gguf=GGUFFamily(
        "lfm2",
        _gguf,
        words("shortconv.l_cache"),
        packed={f"{_CONV}.in_proj": tuple(f"{_CONV}.{part}_proj" for part in _PARTS)},
    ),
    rename=_renamed,
    compiles=False,
    model="meshlm.workers.models.hybrid:Lfm2",
)
