"""Qwen3-MoE (Yang et al. 2025): Qwen3 with many small experts and none that every token goes to."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean
from meshlm.architectures.dense import dense_gguf, dense_spec, one_window
from meshlm.architectures.family import ExpertTensors, Family, GGUFFamily, GGUFMetadata
from meshlm.architectures.layers import with_attention, with_experts
from meshlm.architectures.moe import GGUF_KEYS, gguf_moe, layers_with_experts, moe_spec
from meshlm.architectures.qwen2_moe import KEYS
from meshlm.architectures.weights import transformer_weights
from meshlm.protocol.model import ModelSpec

DEFAULTS = {
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec, slides = dense_spec(config, architecture), boolean(config, "use_sliding_window")
    window = one_window(config, spec, slides=True) if slides else 0
    spec = with_attention(replace(spec, qk_norm=True), sliding_window=window)
    return with_experts(spec, moe_spec(_one_count(config)), layers_with_experts(config))


def _one_count(config: dict[str, Any]) -> dict[str, Any]:
    """Newer files say num_local_experts. ValueError."""
    known = [config[key] for key in ("num_experts", "num_local_experts") if config.get(key) is not None]
    if any(count != known[0] for count in known):
        raise ValueError(f"num_experts and num_local_experts differ: {known[0]}, {known[1]}")
    return {**config, "num_experts": known[0] if known else 128}


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec = replace(dense_gguf(metadata, architecture), qk_norm=True)
    return with_experts(spec, gguf_moe(metadata, norm_topk_prob=True))


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    spec=_spec,
    weights=transformer_weights,
    keys=KEYS - {"shared_expert_intermediate_size", "qkv_bias"} | {"num_local_experts"},
    defaults=DEFAULTS,
    gguf=GGUFFamily("qwen3moe", _gguf, GGUF_KEYS, experts=True),
    compiles=False,
    experts=ExpertTensors("mlp.experts.{}", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", interleaved=False),
)
