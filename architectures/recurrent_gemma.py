"""RecurrentGemma (Botev et al. 2024), of the Griffin architecture (De et al. 2024): two layers in three keep the state of a real-gated
linear recurrent unit, the third has a window."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, number, positive, shown, words
from meshlm.architectures.dense import activation, dense_spec
from meshlm.architectures.family import Family, Split, Weight
from meshlm.architectures.layers import with_attention, with_states
from meshlm.architectures.weights import Norms, columns, rows, transformer_weights
from meshlm.protocol.layers import StateSpec
from meshlm.protocol.model import ModelSpec

_NORMS: Norms = (("temporal_pre_norm", "", "input_norm"), ("channel_pre_norm", "", "post_norm"))
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
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


def _mixer(spec: ModelSpec) -> Iterator[Weight]:
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


def _renamed(name: str) -> str:
    name = name.replace("model.final_norm.", "model.norm.").replace(".mlp_block.", ".mlp.")
    stem, block, rest = name.partition(".temporal_block.")
    if not block:
        return name
    return f"{stem}.self_attn.{rest}" if rest.startswith(_ATTENTION) else f"{stem}.{rest}"


FAMILY = Family(
    architecture="RecurrentGemmaForCausalLM",
    model_type="recurrent_gemma",
    spec=_spec,
    weights=partial(transformer_weights, norms=_NORMS, norm_plus=1.0, state=_mixer),
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
    rename=_renamed,
    float16=False,
    compiles=False,
    model="meshlm.workers.models.recurrent_gemma:RecurrentGemma",
)
