"""GLM-4.5, 4.6 and 4.7 (GLM Team 2025): experts scored by sigmoids behind some dense layers, and half of each head is turned.

The layers behind the last, which draft further tokens, are not loaded.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, words
from meshlm.architectures.deepseek_v2 import GGUF_EXPERT_KEYS, NAMES, with_gguf_experts, with_routed_experts
from meshlm.architectures.dense import dense_gguf, dense_spec, one_window, partly_rotated
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.weights import POST_ATTENTION_NORMS, PRE_NORMS, Norms, transformer_weights
from meshlm.protocol.layers import MoESpec
from meshlm.protocol.model import ModelSpec

DRAFTS = ("num_nextn_predict_layers", "num_mtp_layers")  # older files, newer files
SIGMOID = MoESpec(
    num_experts=1,
    num_experts_per_tok=1,
    moe_intermediate_size=1,
    scoring_func="sigmoid",
    group_score="top2",
    correction_bias=True,
)
KEYS = words("""
    n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size first_k_dense_replace n_group topk_group
    norm_topk_prob routed_scaling_factor use_qk_norm
""")


def sigmoid_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """A dense spec with experts that are scored by sigmoids. KeyError, ValueError."""
    spec = dense_spec({**config, "mlp_bias": False}, architecture)
    moe = replace(SIGMOID, norm_topk_prob=boolean(config, "norm_topk_prob"))
    return with_routed_experts(config, spec, moe)


def sigmoid_weights(spec: ModelSpec, norms: Norms = PRE_NORMS) -> Iterator[Weight]:
    """Every tensor."""
    return transformer_weights(spec, norms, experts=NAMES)


def sigmoid_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """A spec whose experts are scored by sigmoids, unless the .gguf file says otherwise. MetadataError."""
    spec = dense_gguf(metadata, architecture)
    spec = replace(spec, qk_norm="blk.0.attn_q_norm.weight" in metadata.shapes)
    return partly_rotated(with_gguf_experts(metadata, spec, plain=2), metadata)


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = sigmoid_spec(config, architecture)
    one_window(config, spec, slides=False)
    drafts = max(integer(config, key, 0) for key in DRAFTS)
    return replace(spec, output_bias=False, qk_norm=boolean(config, "use_qk_norm"), num_nextn_predict_layers=drafts)


FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    spec=_spec,
    weights=lambda spec: sigmoid_weights(spec, POST_ATTENTION_NORMS),
    keys=KEYS | set(DRAFTS),
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    gguf=GGUFFamily("glm4moe", sigmoid_gguf, GGUF_EXPERT_KEYS, experts=True),
    compiles=False,
)
