"""Llama 4, its text models (Meta 2025): layers that see a chunk of the text, layers without positions that see all, and experts.
An expert's input is multiplied by the sigmoid of its score. Heads of layers with positions may be normed, without a weight.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures import config_values
from meshlm.architectures.dense import dense_gguf, dense_spec
from meshlm.architectures.family import ExpertTensors, Family, GGUFFamily, GGUFMetadata, MetadataError, Weight
from meshlm.architectures.layers import GGUF_KEYS, checked, gguf_moe, moe_spec, with_attention, with_experts
from meshlm.architectures.llama import without_positions
from meshlm.architectures.weights import ExpertNames, rotating_neighbours, transformer_weights
from meshlm.protocol.model import ModelSpec

NAMES = ExpertNames("feed_forward.router", "feed_forward.experts.{}", shared="feed_forward.shared_expert")
_CHUNK, _MAVERICK = 8192, 128  # of a .gguf file: tokens of a chunk; experts of the model whose heads are not normed
_KINDS = ("chunked_attention", "full_attention")


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    config_values.refuse_quantised(config, architecture, "heads rotate neighbours")
    wide = config_values.integer(config, "intermediate_size")
    spec = dense_spec(
        {**config, "intermediate_size": config_values.integer(config, "intermediate_size_mlp")}, architecture
    )
    without = without_positions(config, spec.num_hidden_layers)
    chunk = config_values.integer(config, "attention_chunk_size", 0)
    if chunk < 0:
        raise ValueError(f"attention_chunk_size is {chunk}; it must be positive, or null")
    named = _chunked(config, without)
    chunked = named if 0 < chunk < spec.max_position_embeddings else (False,) * len(named)
    if config_values.integer(config, "num_experts_per_tok") != 1:
        raise ValueError(
            f"num_experts_per_tok {config['num_experts_per_tok']} is not supported for {architecture}; it must be 1"
        )
    moe = replace(
        moe_spec({**config, "norm_topk_prob": False}, "num_local_experts", "intermediate_size"),
        scoring_func="sigmoid",
        weights_on_input=True,
        shared_intermediate_size=wide,
    )
    temperature = None
    if config.get("attn_temperature_tuning"):  # older files have a number there
        temperature = (
            config_values.number(config["attn_scale"], "attn_scale"),
            config_values.number(config["floor_scale"], "floor_scale"),
        )
        if not temperature[1]:
            raise ValueError("floor_scale is 0; it must be positive")
    normed = config_values.boolean(config, "use_qk_norm")
    if normed:  # heads are normed behind their rotation, which takes away what YaRN and LongRoPE multiply them by
        spec = replace(spec, rope=replace(spec.rope, attention_factor=1.0))
    spec = with_attention(with_attention(spec, chunked, attention_chunk_size=chunk), without, rotates=False)
    spec = with_experts(spec, checked(moe), _layers_with_experts(config))
    return replace(spec, qk_norm=normed, attn_temperature=temperature)


def _chunked(config: dict[str, Any], without: tuple[bool, ...]) -> tuple[bool, ...]:
    """The layers that see their chunk: those that are named so, else all with positions. ValueError."""
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(not one for one in without)
    return tuple(kind == _KINDS[0] for kind in config_values.layer_kinds(kinds, len(without), _KINDS))


def _layers_with_experts(config: dict[str, Any]) -> tuple[bool, ...]:
    """The layers with experts, by moe_layers or interleave_moe_layer_step. ValueError."""
    layers, given = config_values.integer(config, "num_hidden_layers"), config.get("moe_layers")
    if given is None:
        step = config_values.positive(config, "interleave_moe_layer_step", 1)
        given = list(range(step - 1, layers, step))
    if not isinstance(given, list) or any(type(one) is not int or not 0 <= one < layers for one in given):
        raise ValueError(f"moe_layers must be a list of numbers of layers, got {config_values.shown(given)}")
    found = tuple(layer in given for layer in range(layers))
    if not any(found):
        raise ValueError("moe_layers and interleave_moe_layer_step leave no layer with experts")
    return found


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """llama.cpp knows what its files do not say: chunks, layers without positions, how queries grow, which heads are normed."""
    spec, get, layers = dense_gguf(metadata, architecture), metadata.get, int(metadata.get("block_count"))
    step = int(get("interleave_moe_layer_step"))
    if step < 1 or int(get("attention.sliding_window", _CHUNK)) != _CHUNK or int(get("expert_used_count")) != 1:
        raise MetadataError(
            f"metadata {metadata.kind} is not of a Llama 4: interleave_moe_layer_step must be positive, "
            f"attention.sliding_window {_CHUNK} where it is given, expert_used_count 1"
        )
    moe = gguf_moe(metadata, scoring_func="sigmoid", weights_on_input=True)
    moe = replace(moe, shared_intermediate_size=moe.moe_intermediate_size)
    without = without_positions({}, layers)
    if spec.max_position_embeddings > _CHUNK:
        spec = with_attention(spec, (not one for one in without), attention_chunk_size=_CHUNK)
    spec = with_experts(
        with_attention(spec, without, rotates=False), moe, (not (layer + 1) % step for layer in range(layers))
    )
    return replace(spec, qk_norm=moe.num_experts != _MAVERICK, attn_temperature=(0.1, 8192.0))


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    plain = replace(spec, qk_norm=False)  # the norms of heads have no weights
    found = transformer_weights(plain, mlp=("feed_forward", "ffn_{}", "mlp"), experts=NAMES)
    return rotating_neighbours(spec, found)


FAMILY = Family(
    architecture="Llama4ForCausalLM",
    model_type="llama4_text",
    spec=_spec,
    weights=_weights,
    keys=config_values.words("""
        intermediate_size_mlp num_local_experts num_experts_per_tok moe_layers interleave_moe_layer_step use_qk_norm
        no_rope_layers no_rope_layer_interval attention_chunk_size attn_temperature_tuning attn_scale floor_scale
        router_jitter_noise for_llm_compressor
    """),
    defaults={"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 500000.0, "max_position_embeddings": 131072}
    | {"attention_chunk_size": 8192, "attn_temperature_tuning": True, "attn_scale": 0.1}
    | {"rms_norm_eps": 1e-5, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "use_qk_norm": True}
    | {"floor_scale": 8192, "num_local_experts": 16, "num_experts_per_tok": 1},
    gguf=GGUFFamily(
        "llama4", _gguf, GGUF_KEYS | frozenset(("interleave_moe_layer_step", "attention.sliding_window")), experts=True
    ),
    experts=ExpertTensors(
        "feed_forward.experts.{}",
        "feed_forward.experts.gate_up_proj",
        "feed_forward.experts.down_proj",
        interleaved=False,
    ),
    model="meshlm.workers.models.llama_variants:Llama4",
)
