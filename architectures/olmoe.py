"""OLMoE (Muennighoff et al. 2024): experts in each layer; norms over all query heads together, all key heads together."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import number, words
from meshlm.architectures.dense import dense_gguf, dense_spec, one_window
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata
from meshlm.architectures.layers import with_experts
from meshlm.architectures.moe import GGUF_KEYS, gguf_moe, moe_spec
from meshlm.architectures.olmo2 import DEFAULTS, olmo_attention
from meshlm.architectures.weights import transformer_weights
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = dense_spec({**config, "mlp_bias": False}, architecture)
    one_window(config, spec, slides=False)
    clip = number(config.get("clip_qkv") or 0.0, "clip_qkv")
    return with_experts(replace(spec, clip_qkv=clip), moe_spec(config, wide="intermediate_size"))


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    clip = float(metadata.get("attention.clamp_kqv", 0.0))
    return with_experts(replace(dense_gguf(metadata, architecture), clip_qkv=clip), gguf_moe(metadata))


FAMILY = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    spec=_spec,
    weights=lambda spec: transformer_weights(spec, attention=olmo_attention),
    keys=words("clip_qkv num_experts num_experts_per_tok norm_topk_prob"),
    defaults={**DEFAULTS, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
    gguf=GGUFFamily("olmoe", _gguf, GGUF_KEYS | {"attention.clamp_kqv"}, experts=True),
    compiles=False,
    model="meshlm.workers.models.olmoe:Olmoe",
)
