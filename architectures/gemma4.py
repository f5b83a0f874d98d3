"""Gemma 4, its text models: layers that see all have heads of their own, whose values may be their keys, and rotate a part of them.

The small models have a vector of each token for each layer, and layers that share keys and values; the sparse one has experts beside
the MLP of each layer.

The .gguf files of Gemma 4: llama.cpp's keys, which give the heads of layers that see all as those of the model.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures import layers as records
from meshlm.architectures import weights
from meshlm.architectures.config_values import boolean, integer, refuse_quantised, shown, words
from meshlm.architectures.dense import dense_gguf, layer_types
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, Weight
from meshlm.architectures.gemma import DEFAULTS, KEYS, SANDWICH_NORMS, gemma_spec, per_layer_tables, per_layer_weights
from meshlm.architectures.rope import ropes_by_kind
from meshlm.protocol.layers import LayerSpec, MoESpec
from meshlm.protocol.model import ModelSpec, PerLayerInputSpec, RopeSpec

_STILL = 1e29  # a frequency that is divided by so much turns nothing


def _gguf_spec(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    get, layers = metadata.get, int(metadata.get("block_count"))
    sliding = tuple(
        map(bool, _gguf_of_layers(get("attention.sliding_window_pattern"), layers, "sliding_window_pattern"))
    )
    if sliding[-1]:
        raise MetadataError("attention.sliding_window_pattern: the last layer must see all")
    shared = int(get("attention.shared_kv_layers", 0))
    wide = _gguf_of_layers(get("feed_forward_length"), layers, "feed_forward_length")
    keys = _gguf_of_layers(get("attention.head_count_kv"), layers, "head_count_kv")
    own = {slides: {count for count, kind in zip(keys, sliding, strict=True) if kind == slides} for slides in (0, 1)}
    if any(len(counts) > 1 for counts in own.values()):
        raise MetadataError(f"attention.head_count_kv {keys} differs among layers of a kind")
    (full_keys,) = own[0]
    head_dim = int(get("attention.key_length_swa"))
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if int(get(key, head_dim)) != head_dim:
            raise MetadataError(f"{key} is {get(key)}; only {head_dim} is supported here")
    plain = {
        "feed_forward_length": wide[0],
        "attention.head_count_kv": own[1].pop() if own[1] else full_keys,
        "attention.key_length": head_dim,
    }
    fields = {**metadata.fields, **{f"{metadata.kind}.{key}": value for key, value in plain.items()}}
    spec = dense_gguf(metadata._replace(fields=fields, rope_factors=()), architecture)
    spec = records.with_attention(
        spec, sliding, sliding_window=int(get("attention.sliding_window")) if any(sliding) else 0
    )
    spec = records.with_shared_caches(spec, shared, "attention.shared_kv_layers", MetadataError)
    full = {
        "num_key_value_heads": full_keys,
        "head_dim": int(get("attention.key_length")),
        "keys_are_values": _keys_are_values(metadata, sliding, layers - shared),
    }
    spec = records.with_attention(spec, [not slides for slides in sliding], **full)
    if shared and wide[-1] == 2 * wide[0]:
        spec = records.with_mlps(spec, records.sharing(spec), intermediate_size=wide[-1])
    if [layer.intermediate_size for layer in spec.layers] != wide:
        raise MetadataError(
            f"feed_forward_length {wide}: layers that share keys and values may have twice that of others"
        )
    rope = replace(spec.rope, rope_type="proportional", partial_rotary_factor=_turning(metadata.rope_factors))
    spec = replace(
        spec, hidden_act="gelu_pytorch_tanh", query_pre_attn_scalar=1.0, qk_norm=True, rope=rope,
        sliding_rope=RopeSpec(rope_theta=float(get("rope.freq_base_swa", 10_000.0))),
        final_logit_softcapping=float(get("final_logit_softcapping", 0.0)),
        per_layer_input=_gguf_per_layer_input(metadata),
    )  # fmt: skip
    if int(get("expert_count", 0)):
        moe = records.gguf_moe(metadata._replace(fields=fields), norm_topk_prob=True)
        spec = spec.with_layers(lambda layer: replace(layer, experts=moe))
    return spec


def _gguf_of_layers(value: Any, layers: int, key: str) -> list[int]:
    found = list(map(int, value)) if isinstance(value, list | tuple) else [int(value)] * layers
    if len(found) != layers:
        raise MetadataError(f"{key} names {len(found)} layers of {layers}")
    return found


def _turning(factors: tuple[float, ...]) -> float:
    """The part of a head's numbers that turns, in layers that see all: the others' frequencies are divided by a huge number."""
    turning = sum(factor == 1 for factor in factors)
    if any(factor != 1 for factor in factors[:turning]) or any(factor < _STILL for factor in factors[turning:]):
        raise MetadataError("rope_freqs.weight must have ones, and huge numbers behind them")
    return turning / len(factors) if factors else 1.0


def _keys_are_values(metadata: GGUFMetadata, sliding: tuple[bool, ...], own: int) -> bool:
    """own: the layers that share with none. Those that see all have no projection of values then."""
    without = {f"blk.{layer}.attn_v.weight" not in metadata.shapes for layer in range(own) if not sliding[layer]}
    if len(without) != 1:
        raise MetadataError("attn_v.weight is there in some of the layers that see all, and not in others")
    return without.pop()


def _gguf_per_layer_input(metadata: GGUFMetadata) -> PerLayerInputSpec | None:
    size = int(metadata.get("embedding_length_per_layer_input", 0))
    if not size:
        return None
    table = metadata.shapes.get("per_layer_token_embd.weight", ())
    if len(table) != 2 or table[0] < metadata.shapes["token_embd.weight"][0]:
        raise MetadataError("tensor per_layer_token_embd.weight is missing, or has fewer rows than token_embd.weight")
    return PerLayerInputSpec(hidden_size_per_layer_input=size, vocab_size_per_layer_input=table[0])


GEMMA4_GGUF = GGUFFamily(
    "gemma4",
    _gguf_spec,
    keys=records.GGUF_KEYS
    | words("""
        attention.sliding_window attention.sliding_window_pattern attention.shared_kv_layers attention.key_length_swa
        attention.value_length_swa rope.freq_base_swa rope.dimension_count_swa embedding_length_per_layer_input
        final_logit_softcapping
    """),
)
_EVERY = 6  # of so many layers the last sees all, where the file names no kinds
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPES = {
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
_GLOBAL_HEAD_DIM = 512
_NAMES = weights.ExpertNames(router="router.proj", expert="experts.{}")
_SCALED = "router.scale"
_BESIDE_NORMS = (
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2", "moe_norm"),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1", "mlp_own_norm"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2", "moe_out_norm"),
)


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    refuse_quantised(config, architecture)
    if config.get("use_bidirectional_attention") not in (None, "vision"):  # of images: media.py
        raise ValueError(
            f"use_bidirectional_attention {shown(config['use_bidirectional_attention'])} is not supported for {architecture}"
        )
    kinds = _kinds(config)
    ropes = config.get("rope_parameters") or _ROPES
    if isinstance(ropes, dict) and (lost := sorted(set(kinds) - {kind for kind in ropes if ropes[kind]})):
        raise ValueError(f"rope_parameters says nothing of {lost[0]} layers")
    rope, sliding_rope = ropes_by_kind({**config, "rope_parameters": ropes}, 1_000_000.0, 10_000.0)
    spec = gemma_spec({**config, "layer_types": kinds, "query_pre_attn_scalar": 1}, architecture, _EVERY, rope)
    spec = records.with_attention(spec, [not one.slides for one in spec.attentions], **_full_attention(config, spec))
    spec = records.with_shared_caches(spec, integer(config, "num_kv_shared_layers"), "num_kv_shared_layers")
    if boolean(config, "use_double_wide_mlp"):
        spec = records.with_mlps(spec, records.sharing(spec), intermediate_size=2 * spec.intermediate_size)
    if boolean(config, "enable_moe_block"):
        moe = records.moe_spec({**config, "num_experts_per_tok": config["top_k_experts"], "norm_topk_prob": True})
        spec = spec.with_layers(lambda layer: replace(layer, experts=moe))
    return replace(spec, qk_norm=True, sliding_rope=sliding_rope, per_layer_input=_per_layer_input(config))


def _kinds(config: dict[str, Any]) -> list[str]:
    """The kind of each layer; the last sees all, whatever the file says."""
    layers = integer(config, "num_hidden_layers")
    named = layer_types(config)
    kinds = named or [_SLIDING if (layer + 1) % _EVERY else _FULL for layer in range(layers)]
    return [*kinds[:-1], _FULL]


def _full_attention(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """The fields in which the attention of layers that see all differs from that of layers that slide. ValueError."""
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
    return PerLayerInputSpec(**sizes, padding_id=integer(config, "pad_token_id", 0))


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    hidden, inputs = spec.hidden_size, spec.per_layer_input

    def in_layer(layer: LayerSpec) -> Iterator[Weight]:
        assert layer.attention is not None
        lacks = "kv" if layer.cache_of is not None else "v" if layer.attention.keys_are_values else ""
        for weight in (*weights.attention_weights(spec, layer), *weights.norm_weights(spec, layer, SANDWICH_NORMS)):
            if not any(weight.name.startswith(f"self_attn.{name}_") for name in lacks):
                yield weight
        yield from weights.mlp_weights(spec, layer.intermediate_size)
        yield Weight("layer_scalar", "layer_output_scale.weight", "scalar", (1,))
        if inputs is not None:
            yield from per_layer_weights(inputs.hidden_size_per_layer_input, hidden)
        if layer.experts is not None:
            yield from _beside(spec, layer.experts)

    yield from weights.decoder_weights(spec, in_layer)
    if inputs is not None:
        yield from per_layer_tables(inputs, spec.num_hidden_layers, hidden)


def _beside(spec: ModelSpec, moe: MoESpec) -> Iterator[Weight]:
    hidden = spec.hidden_size
    for weight in weights.expert_weights(spec, moe, _NAMES):
        yield weight._replace(parameter=weight.parameter.replace("mlp.", "moe.", 1))
    for name, gguf, parameter in _BESIDE_NORMS:
        yield Weight(f"{name}.weight", f"{gguf}.weight", f"{parameter}.weight", (hidden,))
    yield Weight(_SCALED, "ffn_gate_inp.scale", "moe.router_norm.weight", (hidden,), times=hidden**-0.5)
    yield Weight("router.per_expert_scale", "ffn_down_exps.scale", "moe.per_expert_scale", (moe.num_experts,))


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
    | words("""
        global_head_dim num_global_key_value_heads per_layer_config attention_k_eq_v use_bidirectional_attention
        vocab_size_per_layer_input hidden_size_per_layer_input num_kv_shared_layers use_double_wide_mlp
        enable_moe_block num_experts top_k_experts moe_intermediate_size
    """),
    defaults=DEFAULTS
    | {"num_attention_heads": 8, "sliding_window": 512, "max_position_embeddings": 131072}
    | {"num_kv_shared_layers": 0}
    | {"hidden_size": 2304, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256},
    packed=_PACKED,
    gguf=GEMMA4_GGUF,
    float16=False,
    model="meshlm.workers.models.gemma4:Gemma4",
    rename=str,
    # Of layers that share, where files have them.
    unread=r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight|blk\.\d+\.attn_(k|v|k_norm)\.weight",
)
