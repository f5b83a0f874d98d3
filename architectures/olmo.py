"""OLMo (Groeneveld et al. 2024), the first: layer norms without weights, and queries, keys and values that may be clipped."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import number, words
from meshlm.architectures.family import GGUFMetadata
from meshlm.architectures.layer_norms import LAYER_NORMS, layer_norm_form, layer_norm_gguf, layer_norm_spec
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_ORDER = LayerNormSpec(gated=True, affine=False)


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = layer_norm_spec({**config, "eps": 1e-5}, architecture, _ORDER, eps="eps")
    return replace(spec, norm_bias=False, clip_qkv=number(config.get("clip_qkv") or 0.0, "clip_qkv"))


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec = layer_norm_gguf(metadata, architecture, _ORDER, "silu")
    return replace(spec, clip_qkv=float(metadata.get("attention.clamp_kqv", 0.0)))


FAMILY = LAYER_NORMS._replace(
    architecture="OlmoForCausalLM",
    model_type="olmo",
    spec=_spec,
    keys=words("clip_qkv"),
    defaults={"hidden_act": "silu", "max_position_embeddings": 2048},
    gguf=layer_norm_form("olmo", _gguf, "attention.clamp_kqv", interleaved_heads=True),
)
