"""Qwen3-Next (Qwen 2025): three layers in four are gated delta nets, the others attend with a gate; many small experts in each.
Qwen3.5 (Qwen 2026): Qwen3-Next's gated delta nets and attention with a gate, in front of MLPs or of experts.
The rows of a mixer's products stand by kind (all queries, all keys, ...), and not by heads of keys as Qwen3-Next's.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, pairs, positive, words
from meshlm.architectures.dense import dense_gguf, dense_spec, partly_rotated
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, NextN, Split, Weight
from meshlm.architectures.layers import GGUF_KEYS, gguf_moe, layers_with_experts, moe_spec, with_experts, with_states
from meshlm.architectures.states import GGUF_STATE, check_activation, dtype_of_states, layers_of
from meshlm.architectures.weights import POST_ATTENTION_NORMS, attention_weights, transformer_weights
from meshlm.protocol.layers import LayerSpec, MoESpec, StateSpec
from meshlm.protocol.model import ModelSpec

_EVERY = 4  # of so many layers the last attends
_KINDS = {"linear_attention": "state", "full_attention": "attention"}
Projections = Callable[[StateSpec], tuple[tuple[str, int], ...]]
_GGUF = {"qkvz": "ssm_in", "ba": "ssm_ba"}
_GGUF |= {"q": "attn_qkv.q", "k": "attn_qkv.k", "v": "attn_qkv.v", "z": "attn_gate", "b": "ssm_beta", "a": "ssm_alpha"}
"""llama.cpp's names of a mixer's products, of Qwen3-Next's first files and of Qwen3.5's."""
GGUF_PACKED = {
    "attn_qkv": ("attn_q", "attn_k", "attn_v", "attn_qkv.q", "attn_qkv.k", "attn_qkv.v"),
    "ssm_conv1d": ("ssm_conv1d.q", "ssm_conv1d.k", "ssm_conv1d.v"),
}
GGUF_DELTA = GGUF_STATE | {"attention.recurrent_layers", "full_attention_interval"}
_SIZES = pairs("""
    num_heads=linear_num_value_heads head_dim=linear_value_head_dim state_size=linear_key_head_dim
    n_groups=linear_num_key_heads conv_kernel=linear_conv_kernel_dim
""")


def gated_delta_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """The sizes of everything but MLPs and experts. KeyError, ValueError."""
    check_activation(config)
    spec = dense_spec(config, architecture)
    if config.get("layer_types") is None:
        every = positive(config, "full_attention_interval", _EVERY)
        attends = tuple((layer + 1) % every == 0 for layer in range(spec.num_hidden_layers))
    else:
        attends = tuple(kind == "attention" for kind in layers_of(config, _KINDS))
    sizes: dict[str, Any] = {name: positive(config, key) for name, key in _SIZES.items()}
    if sizes["num_heads"] % sizes["n_groups"]:
        raise ValueError(f"linear_num_value_heads is no multiple of linear_num_key_heads {sizes['n_groups']}")
    state = StateSpec(kind="gated_delta_net", **sizes, conv_bias=False, dtype=dtype_of_states(config))
    spec = replace(spec, qk_norm=True, output_bias=boolean(config, "attention_bias"))
    return with_states(spec, state, (not one for one in attends))


def gated_delta_moe(config: dict[str, Any]) -> MoESpec:
    """The experts of a layer, and the one with a gate that every token goes to. KeyError, ValueError."""
    return replace(
        moe_spec(config),
        norm_topk_prob=config.get("norm_topk_prob") is not False,
        shared_intermediate_size=integer(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )


def gated_delta_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """The spec of a .gguf file without its experts. MetadataError."""
    spec, get = dense_gguf(metadata, architecture), metadata.get
    layers, every = spec.num_hidden_layers, int(get("full_attention_interval", _EVERY))
    recurrent = get("attention.recurrent_layers", [(layer + 1) % max(1, every) > 0 for layer in range(layers)])
    names = ("time_step_rank", "inner_size", "state_size", "group_count", "conv_kernel")
    heads, inner, numbers, groups, kernel = sizes = [int(get(f"ssm.{name}")) for name in names]
    if min(sizes) < 1 or inner % heads or heads % groups or not isinstance(recurrent, list) or len(recurrent) < layers:
        raise MetadataError(
            f"metadata {metadata.kind}: sizes of gated delta nets, or attention.recurrent_layers, do not fit"
        )
    state = StateSpec(
        kind="gated_delta_net", num_heads=heads, head_dim=inner // heads, state_size=numbers, n_groups=groups,
        conv_kernel=kernel, conv_bias=False,
    )  # fmt: skip
    return with_states(replace(partly_rotated(spec, metadata), qk_norm=True), state, map(bool, recurrent[:layers]))


def gated_delta_gguf_moe(metadata: GGUFMetadata) -> MoESpec:
    """The experts of each layer of a .gguf file. MetadataError."""
    shared = int(metadata.get("expert_shared_feed_forward_length"))
    return gguf_moe(metadata, norm_topk_prob=True, shared_intermediate_size=shared, shared_gate=True)


def _qwen3_next_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return with_experts(gated_delta_gguf(metadata, architecture), gated_delta_gguf_moe(metadata))


def _qwen3_next_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = replace(
        gated_delta_spec(config, architecture), num_nextn_predict_layers=integer(config, "num_nextn_predict_layers", 1)
    )
    return with_experts(spec, gated_delta_moe(config), layers_with_experts(config))


def _mixer(spec: ModelSpec, projections: Projections) -> Iterator[Weight]:
    state = spec.state
    assert state is not None
    inner, keys, heads, hidden = state.inner, state.n_groups * state.state_size, state.num_heads, spec.hidden_size
    groups, wide = Split.STATE_GROUPS, Split.INTERMEDIATE
    for name, rows in projections(state):
        yield Weight(
            f"linear_attn.in_proj_{name}.weight",
            f"{_GGUF[name]}.weight",
            "attention.qkv.weight",
            (rows, hidden),
            groups,
        )
    for name, rows in (("q", keys), ("k", keys), ("v", inner)):
        shape = (rows, 1, state.conv_kernel)
        yield Weight(
            f"linear_attn.{name}_conv.weight", f"ssm_conv1d.{name}.weight", "attention.conv.weight", shape, groups
        )
    for name, gguf, parameter in (("dt_bias", "ssm_dt.bias", "dt_bias"), ("A_log", "ssm_a", "a_log")):
        yield Weight(f"linear_attn.{name}", gguf, f"attention.{parameter}", (heads,), wide)
    yield Weight("linear_attn.norm.weight", "ssm_norm.weight", "attention.gated_norm.weight", (state.head_dim,))
    yield Weight("linear_attn.out_proj.weight", "ssm_out.weight", "attention.o.weight", (hidden, inner), wide, dim=1)


def _qwen3_next_projections(state: StateSpec) -> tuple[tuple[str, int], ...]:
    keys = state.n_groups * state.state_size
    return ("qkvz", 2 * keys + 2 * state.inner), ("ba", 2 * state.num_heads)


def gated_delta_weights(spec: ModelSpec, projections: Projections = _qwen3_next_projections) -> Iterator[Weight]:
    """Every tensor. projections: names and rows of a mixer's products, in_proj_NAME."""

    def attention(spec: ModelSpec, layer: LayerSpec) -> Iterator[Weight]:
        for weight in attention_weights(spec, layer):
            if weight.name.startswith("self_attn.q_proj."):  # the gate stands behind each head's query
                weight = weight._replace(shape=(2 * weight.shape[0], *weight.shape[1:]))
            yield weight

    mixer = partial(_mixer, projections=projections)
    return transformer_weights(spec, POST_ATTENTION_NORMS, 1.0, attention=attention, state=mixer)


STATE_KEYS = frozenset(_SIZES.values()) | words("full_attention_interval mamba_ssm_dtype")
EXPERT_KEYS = words("""
    decoder_sparse_step mlp_only_layers num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size
    norm_topk_prob
""")
DEFAULTS = (
    {"partial_rotary_factor": 0.25, "head_dim": 256, "num_key_value_heads": 2}
    | {"max_position_embeddings": 32768}
    | {"linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_key_head_dim": 128}
    | {"linear_num_key_heads": 16, "linear_conv_kernel_dim": 4}
)
EXPERT_DEFAULTS = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512} | {
    "shared_expert_intermediate_size": 512
}
PACKED = {"linear_attn.conv1d": ("linear_attn.q_conv", "linear_attn.k_conv", "linear_attn.v_conv")}
DRAFTS = r"(model\.)?mtp\..*"  # layers that draft further tokens
NEXTN = NextN(
    "meshlm.workers.models.drafters:Qwen3NextN", "mtp.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"
)
QWEN3_NEXT = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    spec=_qwen3_next_spec,
    weights=gated_delta_weights,
    keys=STATE_KEYS | EXPERT_KEYS | {"num_nextn_predict_layers"},
    defaults=DEFAULTS | EXPERT_DEFAULTS,
    packed=PACKED,
    rename=str,
    unread=DRAFTS,
    gguf=GGUFFamily(
        "qwen3next",
        _qwen3_next_gguf,
        GGUF_DELTA | GGUF_KEYS | {"expert_shared_feed_forward_length"},
        experts=True,
        packed=GGUF_PACKED,
        delta_by_kind=True,
    ),
    model="meshlm.workers.models.qwen3_next:Qwen3Next",
    nextn=NEXTN,
)
_KEYS = STATE_KEYS | words("attn_output_gate mtp_num_hidden_layers mtp_use_dedicated_embeddings mlp_only_layers")


def _qwen3_5_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    if not boolean(config, "attn_output_gate"):
        raise ValueError("attn_output_gate false is not supported")
    drafts = integer(config, "mtp_num_hidden_layers", 0)
    return replace(gated_delta_spec(config, architecture), num_nextn_predict_layers=drafts)


def _moe_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    config = {**config, "intermediate_size": config["moe_intermediate_size"]}  # no layer has a plain MLP
    return with_experts(_qwen3_5_spec(config, architecture), gated_delta_moe(config), layers_with_experts(config))


def _qwen3_5_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """States are in float32, as config.json says of this family; positions of text are the same on each axis of its rotation."""
    spec = gated_delta_gguf(metadata, architecture)
    return spec.with_state_dtype("float32")


def _moe_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return with_experts(_qwen3_5_gguf(metadata, architecture), gated_delta_gguf_moe(metadata))


def _qwen3_5_projections(state: StateSpec) -> tuple[tuple[str, int], ...]:
    keys = state.n_groups * state.state_size
    return (
        ("q", keys),
        ("k", keys),
        ("v", state.inner),
        ("z", state.inner),
        ("b", state.num_heads),
        ("a", state.num_heads),
    )


_DEFAULTS = DEFAULTS | {"num_key_value_heads": 4, "attn_output_gate": True}
_MODEL = "meshlm.workers.models.qwen3_next:Qwen3_5"
_PACKED = PACKED | {"linear_attn.in_proj_qkv": tuple(f"linear_attn.in_proj_{part}" for part in "qkv")}
_GGUF_KEYS = GGUF_DELTA | {"rope.dimension_sections"}
_DENSE = Family(
    architecture="Qwen3_5ForCausalLM", model_type="qwen3_5_text", spec=_qwen3_5_spec,
    weights=partial(gated_delta_weights, projections=_qwen3_5_projections), keys=_KEYS, defaults=_DEFAULTS,
    packed=_PACKED, rename=str, unread=DRAFTS, gguf=GGUFFamily("qwen35", _qwen3_5_gguf, _GGUF_KEYS, packed=GGUF_PACKED),
    model=_MODEL, nextn=NEXTN,
)  # fmt: skip
_EXPERTS = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512} | {
    "shared_expert_intermediate_size": 512
}
_MOE = _DENSE._replace(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    spec=_moe_spec,
    gguf=GGUFFamily(
        "qwen35moe",
        _moe_gguf,
        _GGUF_KEYS | GGUF_KEYS | {"expert_shared_feed_forward_length"},
        experts=True,
        packed=GGUF_PACKED,
    ),
    keys=_KEYS | EXPERT_KEYS,
    defaults=_DEFAULTS | _EXPERTS | {"num_key_value_heads": 2},
    packed=_PACKED
    | {
        "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "mlp.experts.down_proj": ("mlp.experts.{}.down_proj",),
    },
)
_QWEN3_5_FAMILIES = (_DENSE, _MOE)
FAMILIES = (QWEN3_NEXT, *_QWEN3_5_FAMILIES)
