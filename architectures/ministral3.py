"""Ministral 3 and its like (Mistral AI 2025): Mistral with YaRN, whose queries grow with their position, as some of Llama 4's do."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import number
from meshlm.architectures.dense import dense_gguf, dense_spec, one_window
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError
from meshlm.architectures.layers import with_attention
from meshlm.architectures.weights import transformer_weights
from meshlm.protocol.model import ModelSpec

_BETA, _CONTEXT = "llama_4_scaling_beta", "max_position_embeddings"
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    _BETA: 0.1,
}


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    given = ((config.get("rope_scaling") or {}) | (config.get("rope_parameters") or {})) or _ROPE
    plain = {key: value for key, value in given.items() if key not in (_BETA, _CONTEXT)}
    spec = dense_spec({**config, "rope_scaling": None, "rope_parameters": plain}, architecture)
    window = one_window(config, spec, slides=True)
    spec = with_attention(replace(spec, max_position_embeddings=int(config[_CONTEXT])), sliding_window=window)
    beta = number(given.get(_BETA) or 0.0, _BETA)
    if not beta:
        return spec
    floor = spec.rope.original_max_position_embeddings
    if floor < 1:
        raise ValueError(f"{_BETA} needs original_max_position_embeddings (rope_parameters)")
    return replace(spec, attn_temperature=(beta, float(floor)))


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """Newer files of Mistral Small are of this kind too, without YaRN and with queries that do not grow."""
    spec, get = dense_gguf(metadata, architecture), metadata.get
    if float(get("rope.scaling.yarn_log_multiplier", 0.0)):  # rotation is not multiplied then
        spec = replace(spec, rope=replace(spec.rope, attention_factor=1.0))
    beta = float(get("attention.temperature_scale", 0.0))
    if not beta:
        return spec
    floor = spec.rope.original_max_position_embeddings
    if floor < 1:
        raise MetadataError(f"metadata {metadata.kind}.rope.scaling.original_context_length is missing")
    return replace(spec, attn_temperature=(beta, float(floor)))


FAMILY = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    spec=_spec,
    weights=transformer_weights,
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
    },
    gguf=GGUFFamily(
        "mistral3",
        _gguf,
        frozenset(("rope.scaling.yarn_log_multiplier", "attention.temperature_scale")),
        interleaved_heads=True,
    ),
    compiles=False,
    model="meshlm.workers.models.ministral3:Ministral3",
)
