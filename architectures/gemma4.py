"""Gemma 4, its text models: layers that see all have heads of their own, whose values may be their keys, and rotate a part of them.

The small models have a vector of each token for each layer, and layers that share keys and values; the sparse one has experts beside
the MLP of each layer.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, shown
from meshlm.architectures.dense import layer_types
from meshlm.architectures.family import Family, Weight
from meshlm.architectures.gemma2 import DEFAULTS, KEYS, SANDWICH_NORMS, gemma_spec
from meshlm.architectures.gemma4_gguf import GEMMA4_GGUF
from meshlm.architectures.layers import sharing, with_attention, with_mlps, with_shared_caches
from meshlm.architectures.moe import moe_spec
from meshlm.architectures.rope import ropes_by_kind
from meshlm.architectures.weights import (
    ExpertNames,
    attention_weights,
    decoder_weights,
    expert_weights,
    mlp_weights,
    norm_weights,
)
from meshlm.protocol.layers import LayerSpec, MoESpec
from meshlm.protocol.model import ModelSpec, PerLayerInputSpec

_EVERY = 6  # of so many layers the last sees all, where the file names no kinds
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
_GLOBAL_HEAD_DIM = 512
_NAMES = ExpertNames(router="router.proj", expert="experts.{}")
_SCALED = "router.scale"
_BESIDE_NORMS = (
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2", "moe_norm"),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1", "mlp_own_norm"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2", "moe_out_norm"),
)


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    for key in ("quantization_config", "compression_config", "quantization"):
        if config.get(key):
            raise ValueError(f"{key} is not supported for {architecture}")
    if config.get("use_bidirectional_attention") not in (None, "vision"):  # of images, which are not served
        raise ValueError(
            f"use_bidirectional_attention {shown(config['use_bidirectional_attention'])} is not supported for {architecture}"
        )
    kinds = _kinds(config)
    ropes = config.get("rope_parameters") or _ROPES
    if isinstance(ropes, dict) and (lost := sorted(set(kinds) - {kind for kind in ropes if ropes[kind]})):
        raise ValueError(f"rope_parameters says nothing of {lost[0]} layers")
    rope, sliding_rope = ropes_by_kind({**config, "rope_parameters": ropes}, 1_000_000.0, 10_000.0)
    spec = gemma_spec({**config, "layer_types": kinds, "query_pre_attn_scalar": 1}, architecture, _EVERY, rope)
    spec = with_attention(spec, [not one.slides for one in spec.attentions], **_full_attention(config, spec))
    spec = with_shared_caches(spec, integer(config, "num_kv_shared_layers"), "num_kv_shared_layers")
    if boolean(config, "use_double_wide_mlp"):
        spec = with_mlps(spec, sharing(spec), intermediate_size=2 * spec.intermediate_size)
    if boolean(config, "enable_moe_block"):
        moe = moe_spec({**config, "num_experts_per_tok": config["top_k_experts"], "norm_topk_prob": True})
        spec = spec.with_layers(lambda layer: replace(layer, experts=moe))
    return replace(spec, qk_norm=True, sliding_rope=sliding_rope, per_layer_input=_per_layer_input(config))


def _kinds(config: dict[str, Any]) -> list[str]:
    """The kind of each layer; the last sees all, whatever the file says."""
    layers = integer(config, "num_hidden_layers")
    named = layer_types(config)
    kinds = named or [_SLIDING if (layer + 1) % _EVERY else _FULL for layer in range(layers)]
    return [*kinds[:-1], _FULL]


def _full_attention(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """What the attention of layers that see all has otherwise than that of layers that slide. ValueError."""
    same = boolean(config, "attention_k_eq_v")
    kv_heads, head_dim = spec.num_key_value_heads, integer(config, "global_head_dim", _GLOBAL_HEAD_DIM)
    if same:
        kv_heads = integer(config, "num_global_key_value_heads", kv_heads)
    if config.get("per_layer_config") is not None:
        kv_heads, head_dim = _of_layers(config["per_layer_config"], spec)
    return {"num_key_value_heads": kv_heads, "head_dim": head_dim, "keys_are_values": same}


def _of_layers(given: Any, spec: ModelSpec) -> tuple[int, int]:
    """Key-value heads and head size of the layers that see all, in the form in which transformers writes them. ValueError."""
    if not isinstance(given, dict) or not all(isinstance(one, dict) for one in given.values()):
        raise ValueError(f"per_layer_config must be an object with an object for each layer, got {shown(given)}")
    names = ("num_key_value_heads", "head_dim")
    own = (spec.num_key_value_heads, spec.head_dim)
    found: dict[bool, set[tuple[int, int]]] = {False: set(), True: set()}
    for layer in range(spec.num_hidden_layers):
        one = given.get(str(layer), {})
        if foreign := sorted(one.keys() - set(names)):
            raise ValueError(f"per_layer_config holds {foreign[0]} of layer {layer}; supported: {', '.join(names)}")
        values = {**dict(zip(names, own, strict=True)), **one}
        found[spec.attentions[layer].slides].add((integer(values, names[0]), integer(values, names[1])))
    if foreign := sorted(given.keys() - set(map(str, range(spec.num_hidden_layers)))):
        raise ValueError(f"per_layer_config holds {shown(foreign[0])}, which is no layer's number")
    if len(found[False]) != 1 or not found[True] <= {own}:
        raise ValueError("per_layer_config must be the same for all layers that see all, and say nothing of the others")
    return found[False].pop()


def _per_layer_input(config: dict[str, Any]) -> PerLayerInputSpec | None:
    """None: there are no such vectors. ValueError."""
    sizes = {key: integer(config, key) for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input")}
    if not sizes["hidden_size_per_layer_input"]:
        return None
    if min(sizes.values()) < 1 or sizes["vocab_size_per_layer_input"] < integer(config, "vocab_size"):
        raise ValueError(
            f"hidden_size_per_layer_input {sizes['hidden_size_per_layer_input']} must be positive and vocab_size_per_layer_input "
            f"{sizes['vocab_size_per_layer_input']} no less than vocab_size {config['vocab_size']}"
        )
    return PerLayerInputSpec(**sizes)


def per_layer_weights(size: int, hidden: int) -> Iterator[Weight]:
    """What a layer makes of its vector of a token, of so many numbers."""
    for name, gguf, parameter, shape in (
        ("per_layer_input_gate.weight", "inp_gate", "per_layer_gate.weight", (size, hidden)),
        ("per_layer_projection.weight", "proj", "per_layer_projection.weight", (hidden, size)),
        ("post_per_layer_input_norm.weight", "post_norm", "per_layer_norm.weight", (hidden,)),
    ):
        yield Weight(name, f"{gguf}.weight", parameter, shape)


def per_layer_tables(sizes: PerLayerInputSpec, layers: int, hidden: int) -> Iterator[Weight]:
    """What makes the vectors of all layers."""
    own = sizes.hidden_size_per_layer_input
    every = layers * own
    for name, gguf, parameter, shape in (
        ("embed_tokens_per_layer", "per_layer_token_embd", "embed.weight", (sizes.vocab_size_per_layer_input, every)),
        ("per_layer_model_projection", "per_layer_model_proj", "project.weight", (every, hidden)),
        ("per_layer_projection_norm", "per_layer_proj_norm", "norm.weight", (own,)),
    ):
        yield Weight(f"model.{name}.weight", f"{gguf}.weight", f"entry.{parameter}", shape)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    hidden, inputs = spec.hidden_size, spec.per_layer_input

    def in_layer(layer: LayerSpec) -> Iterator[Weight]:
        assert layer.attention is not None
        lacks = "kv" if layer.cache_of is not None else "v" if layer.attention.keys_are_values else ""
        for weight in (*attention_weights(spec, layer), *norm_weights(spec, layer, SANDWICH_NORMS)):
            if not any(weight.name.startswith(f"self_attn.{name}_") for name in lacks):
                yield weight
        yield from mlp_weights(spec, layer.intermediate_size)
        yield Weight("layer_scalar", "layer_output_scale.weight", "scalar", (1,))
        if inputs is not None:
            yield from per_layer_weights(inputs.hidden_size_per_layer_input, hidden)
        if layer.experts is not None:
            yield from _beside(spec, layer.experts)

    yield from decoder_weights(spec, in_layer)
    if inputs is not None:
        yield from per_layer_tables(inputs, spec.num_hidden_layers, hidden)


def _beside(spec: ModelSpec, moe: MoESpec) -> Iterator[Weight]:
    """The experts of a layer, beside its MLP."""
    hidden = spec.hidden_size
    for weight in expert_weights(spec, moe, _NAMES):
        yield weight._replace(parameter=weight.parameter.replace("mlp.", "moe.", 1))
    for name, gguf, parameter in _BESIDE_NORMS:
        yield Weight(f"{name}.weight", f"{gguf}.weight", f"{parameter}.weight", (hidden,))
    yield Weight(_SCALED, "ffn_gate_inp.scale", "moe.router_norm.weight", (hidden,), times=hidden**-0.5)
    yield Weight("router.per_expert_scale", "ffn_down_exps.scale", "moe.per_expert_scale", (moe.num_experts,))


def _as_it_is(name: str) -> str:
    return name


_PACKED = {
    "experts.gate_up_proj": ("experts.{}.gate_proj", "experts.{}.up_proj"),
    "experts.down_proj": ("experts.{}.down_proj",),
}
FAMILY = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    other_model_types=frozenset(("gemma4_unified_text",)),
    spec=_spec,
    weights=_weights,
    keys=(KEYS - {"attn_logit_softcapping", "query_pre_attn_scalar"})
    | {
        "global_head_dim",
        "num_global_key_value_heads",
        "per_layer_config",
        "attention_k_eq_v",
        "use_bidirectional_attention",
        "vocab_size_per_layer_input",
        "hidden_size_per_layer_input",
        "num_kv_shared_layers",
        "use_double_wide_mlp",
        "enable_moe_block",
        "num_experts",
        "top_k_experts",
        "moe_intermediate_size",
    },
    defaults={
        **DEFAULTS,
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0,
    },
    packed=_PACKED,
    gguf=GEMMA4_GGUF,
    float16=False,
    compiles=False,
    model="meshlm.workers.models.gemma4:Gemma4",
    rename=_as_it_is,
    # Of layers that share, where files have them.
    unread=r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight|blk\.\d+\.attn_(k|v|k_norm)\.weight",
)
