"""DeepSeek-V3 and R1 (DeepSeek-AI 2024): V2 with experts that are scored by sigmoids and chosen with a correction bias.

The layers behind the last, which draft further tokens (multi-token prediction), are not loaded.
"""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, shown
from meshlm.architectures.deepseek_v2 import KEYS, MODEL, deepseek_spec, deepseek_weights
from meshlm.architectures.family import Family
from meshlm.protocol.layers import MoESpec
from meshlm.protocol.model import ModelSpec

DRAFTS = ("num_nextn_predict_layers", "num_mtp_layers")  # older files, newer files
DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def deepseek_v3_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """KeyError, ValueError."""
    for key, wanted in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        if config.get(key, wanted) != wanted:
            raise ValueError(f"{key} {shown(config[key])} is not supported for {architecture}; supported: {wanted}")
    moe = MoESpec(
        num_experts=1,
        num_experts_per_tok=1,
        moe_intermediate_size=1,
        scoring_func="sigmoid",
        norm_topk_prob=boolean(config, "norm_topk_prob"),
        group_score="top2",
        correction_bias=True,
    )
    drafts = max(integer(config, key, 0) for key in DRAFTS)
    return replace(deepseek_spec(config, architecture, moe), num_nextn_predict_layers=drafts)


FAMILY = Family(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    other_model_types=frozenset(("kimi_k2",)),
    spec=deepseek_v3_spec,
    weights=deepseek_weights,
    keys=KEYS | set(DRAFTS),
    defaults=DEFAULTS,
    compiles=False,
    model=MODEL,
)
