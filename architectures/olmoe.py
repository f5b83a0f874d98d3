"""OLMoE (Muennighoff et al. 2024): experts in each layer; norms over all query heads together, all key heads together."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import number, words
from meshlm.architectures.dense import decoder_weights, dense_gguf, dense_spec, mlp_weights, norm_weights, one_window
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.moe import GGUF_KEYS, expert_weights, gguf_moe, moe_spec
from meshlm.architectures.olmo2 import DEFAULTS, olmo_attention
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = dense_spec({**config, "mlp_bias": False}, architecture)
    one_window(config, spec, slides=False)
    clip = number(config.get("clip_qkv") or 0.0, "clip_qkv")
    return replace(spec, moe=moe_spec(config, wide="intermediate_size"), clip_qkv=clip)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    def in_layer(layer: int) -> Iterator[Weight]:
        yield from olmo_attention(spec)
        yield from expert_weights(spec) if spec.has_experts(layer) else mlp_weights(spec, spec.intermediate_size)
        yield from norm_weights(spec)

    return decoder_weights(spec, in_layer)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    clip = float(metadata.get("attention.clamp_kqv", 0.0))
    return replace(dense_gguf(metadata, architecture), moe=gguf_moe(metadata), clip_qkv=clip)


FAMILY = Family(
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    spec=_spec,
    weights=_weights,
    keys=words("clip_qkv num_experts num_experts_per_tok norm_topk_prob"),
    defaults={**DEFAULTS, "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
    gguf=GGUFFamily("olmoe", _gguf, GGUF_KEYS | {"attention.clamp_kqv"}, experts=True),
    compiles=False,
    model="meshlm.workers.models.olmoe:Olmoe",
)
