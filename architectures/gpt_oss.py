"""gpt-oss (OpenAI 2025): every other layer slides, heads have sinks, and experts have biases and a clamped activation."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from meshlm.architectures import layers
from meshlm.architectures.config_values import integer, number, shown, words
from meshlm.architectures.dense import dense_gguf, dense_spec
from meshlm.architectures.dense import sliding_layers as layers_that_slide
from meshlm.architectures.family import ExpertTensors, Family, GGUFFamily, GGUFMetadata, Split, Weight
from meshlm.architectures.weights import POST_ATTENTION_NORMS, ExpertNames, attention_weights, transformer_weights
from meshlm.protocol.layers import LayerSpec
from meshlm.protocol.model import ModelSpec

NAMES = ExpertNames(router="mlp.router")
_ALPHA, _LIMIT = 1.702, 7.0
_EVERY = 2  # of so many layers the last sees all
_YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096} | {
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    chosen = [config[key] for key in ("num_experts_per_tok", "experts_per_token") if config.get(key) is not None]
    if any(count != chosen[0] for count in chosen):
        raise ValueError(f"num_experts_per_tok and experts_per_token differ: {shown(chosen[0])}, {shown(chosen[1])}")
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        config = {**config, "rope_scaling": _YARN}
    spec = dense_spec(config, architecture)
    _check_context(config, spec)
    window, sliding = layers_that_slide(config, _EVERY)
    moe = layers.moe_spec({**config, "num_experts_per_tok": chosen[0]}, "num_local_experts", "intermediate_size")
    alpha, limit = (number(config[key], key) for key in ("swiglu_alpha", "swiglu_limit"))
    moe = layers.checked(replace(moe, norm_topk_prob=True, router_bias=True, expert_bias=True, swiglu=(alpha, limit)))
    spec = layers.with_attention(replace(spec, attention_sinks=True), sliding, sliding_window=window)
    return layers.with_experts(spec, moe)


def _check_context(config: dict[str, Any], spec: ModelSpec) -> None:
    """The context before it was stretched stands in the file twice. ValueError."""
    original = integer(config, "initial_context_length", 0)
    if original and spec.rope.rope_type == "yarn" and original != spec.rope.original_max_position_embeddings:
        raise ValueError(
            f"initial_context_length {original} differs from original_max_position_embeddings "
            f"{spec.rope.original_max_position_embeddings}"
        )


def _attention(spec: ModelSpec, layer: LayerSpec) -> Iterator[Weight]:
    yield from attention_weights(spec, layer)
    heads = (spec.num_attention_heads,)
    yield Weight("self_attn.sinks", "attn_sinks.weight", "attention.sinks", heads, Split.QUERY_HEADS)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """llama.cpp's code knows what its files do not say: YaRN without rounding, layers that slide, and the activation."""
    spec = dense_gguf(metadata, architecture)
    moe = layers.gguf_moe(metadata, norm_topk_prob=True, router_bias=True, expert_bias=True, swiglu=(_ALPHA, _LIMIT))
    window = int(metadata.get("attention.sliding_window"))
    spec = replace(spec, rope=replace(spec.rope, truncate=False), attention_sinks=True)
    return layers.with_experts(
        layers.with_attention(spec, layers.all_but_each(_EVERY, spec.num_hidden_layers), sliding_window=window), moe
    )


FAMILY = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    spec=_spec,
    weights=partial(transformer_weights, norms=POST_ATTENTION_NORMS, attention=_attention, experts=NAMES),
    keys=words("""
        num_local_experts num_experts_per_tok experts_per_token initial_context_length swiglu_limit swiglu_alpha
    """),
    defaults={"head_dim": 64, "num_key_value_heads": 8, "attention_bias": True, "sliding_window": 128}
    | {"max_position_embeddings": 131072, "rope_theta": 150000.0}
    | {"rms_norm_eps": 1e-5, "swiglu_alpha": _ALPHA, "swiglu_limit": _LIMIT, "num_local_experts": 128},
    experts=ExpertTensors("mlp.experts.{}", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", interleaved=True),
    gguf=GGUFFamily("gpt-oss", _gguf, layers.GGUF_KEYS | {"attention.sliding_window"}, experts=True),
    compiles=False,
    parsers=("openai", "openai_gptoss"),
)
