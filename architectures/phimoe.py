"""Phi-3.5-MoE (Abdin et al. 2024): layer norms, and experts that SparseMixer chooses (workers/models/phimoe.py)."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, number, words
from meshlm.architectures.dense import dense_gguf, one_window, partly_rotated
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.layer_norms import layer_norm_spec, layer_norm_weights
from meshlm.architectures.layers import with_attention, with_experts
from meshlm.architectures.mistral import NAMES
from meshlm.architectures.moe import GGUF_KEYS, gguf_moe, moe_spec
from meshlm.architectures.phi3 import with_long_factors
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_JITTER = 0.01
_MSCALES = ("short_mscale", "long_mscale")


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    order = LayerNormSpec(gated=True, head_bias=boolean(config, "lm_head_bias"))
    spec = layer_norm_spec(_with_one_mscale(config), architecture, order, eps="rms_norm_eps")
    moe = moe_spec(config, "num_local_experts", "intermediate_size")
    if moe.num_experts_per_tok != 2 or moe.num_experts < 2:
        raise ValueError(f"num_experts_per_tok is {moe.num_experts_per_tok}; SparseMixer chooses 2")
    moe = replace(moe, sparse_mixer=number(config["router_jitter_noise"], "router_jitter_noise"))
    return with_experts(with_attention(spec, sliding_window=one_window(config, spec, slides=True)), moe)


def _with_one_mscale(config: dict[str, Any]) -> dict[str, Any]:
    """The config whose rotation has an attention_factor in the place of two that are equal. ValueError."""
    found = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key) or {}
        if not isinstance(rope, dict) or not any(name in rope for name in _MSCALES):
            continue
        short, long = (number(rope.get(name), name) for name in _MSCALES)
        if short != long:
            raise ValueError(f"short_mscale {short} and long_mscale {long} differ; that is not supported")
        rest = {name: value for name, value in rope.items() if name not in _MSCALES}
        found[key] = {**rest, "attention_factor": short}
    return found


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """The window of the file is what the model was trained with, as Phi-3's."""
    spec = with_long_factors(dense_gguf(metadata, architecture), metadata)
    order = LayerNormSpec(gated=True, head_bias="output.bias" in metadata.shapes)
    spec = replace(partly_rotated(spec, metadata), norm_bias=True, layer_norms=order)
    return with_experts(spec, gguf_moe(metadata, sparse_mixer=_JITTER))


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    return layer_norm_weights(spec, experts=NAMES)


_FAMILY = Family(
    architecture="PhimoeForCausalLM",
    model_type="phimoe",
    spec=_spec,
    weights=_weights,
    keys=words("lm_head_bias num_local_experts num_experts_per_tok router_jitter_noise input_jitter_noise"),
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "router_jitter_noise": _JITTER,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
    },
    gguf=GGUFFamily(
        "phimoe", _gguf, GGUF_KEYS | frozenset(("attention.sliding_window", "rope.scaling.attn_factor")), experts=True
    ),
    compiles=False,
    model="meshlm.workers.models.phimoe:PhiMoE",
)
FAMILIES = (_FAMILY, _FAMILY._replace(architecture="PhiMoEForCausalLM", gguf=None))
