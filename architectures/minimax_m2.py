"""MiniMax-M2 (MiniMax 2025): experts that are scored by sigmoids and chosen with a correction bias; norms over all heads together.

Files name them as Mixtral's do. The modules that draft further tokens (MTP) are not loaded.
"""

import re
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, shown, words
from meshlm.architectures.deepseek_v2 import GGUF_EXPERT_KEYS, with_gguf_experts
from meshlm.architectures.dense import dense_gguf, full_spec, partly_rotated
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.layers import with_experts
from meshlm.architectures.mistral import NAMES
from meshlm.architectures.moe import moe_spec
from meshlm.architectures.olmo2 import olmo_attention
from meshlm.architectures.weights import transformer_weights
from meshlm.protocol.model import ModelSpec

_WANTED: dict[str, Any] = {
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
}
_WANTED |= dict.fromkeys(words("layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta"), 1.0)
_WANTED["shared_intermediate_size"] = 0
_BIAS = re.compile(r"(model\.layers\.\d+\.)(?:block_sparse_moe|mlp)\.(?:gate\.)?(e_score_correction_bias)")


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    for key, wanted in _WANTED.items():
        if config.get(key, wanted) != wanted:
            raise ValueError(f"{key} {shown(config[key])} is not supported for {architecture}; supported: {wanted}")
    if any(kind != 1 for kind in config.get("attn_type_list") or ()):
        raise ValueError("attn_type_list holds layers that do not attend to all tokens; supported: 1")
    if config.get("rotary_dim") is not None and config.get("partial_rotary_factor") is None:
        config = {**config, "partial_rotary_factor": integer(config, "rotary_dim") / integer(config, "head_dim")}
    spec = full_spec(config, architecture)
    moe = replace(
        moe_spec(config, "num_local_experts", "intermediate_size"),
        scoring_func="sigmoid",
        norm_topk_prob=True,
        correction_bias=True,
    )
    return with_experts(spec, moe)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    return transformer_weights(spec, attention=olmo_attention, experts=NAMES)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec = dense_gguf(metadata, architecture)
    return partly_rotated(with_gguf_experts(metadata, spec, plain=2, norm_topk_prob=True), metadata)


def _renamed(name: str) -> str:
    return _BIAS.sub(rf"\1{NAMES.router}.\2", name)


FAMILY = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    spec=_spec,
    weights=_weights,
    keys=frozenset(_WANTED)
    | words("""
        attn_type_list rotary_dim num_local_experts num_experts_per_tok router_jitter_noise use_mtp num_mtp_modules
        mtp_transformer_layers mlp_intermediate_size shared_moe_mode
    """),
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rope_theta": 5e6,
    },
    rename=_renamed,
    unread=r"(model\.)?mtp.*",
    gguf=GGUFFamily("minimax-m2", _gguf, GGUF_EXPERT_KEYS, experts=True),
    compiles=False,
    model="meshlm.workers.models.olmoe:Olmoe",
)
