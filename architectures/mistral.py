"""Mistral (Jiang et al. 2023): a Llama whose layers may all slide. llama.cpp calls it llama.
Ministral (Mistral AI 2024): Mistral of which some layers slide and the others see all.
Ministral 3 and its like (Mistral AI 2025): Mistral with YaRN, whose queries grow with their position, as some of Llama 4's do.
Mixtral (Jiang et al. 2024): Mistral with experts in each layer, whose weights are a softmax over the chosen ones.
"""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import number
from meshlm.architectures.dense import dense_gguf, dense_spec, one_window, sliding_layers, windowed_spec
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError
from meshlm.architectures.layers import GGUF_KEYS, gguf_moe, moe_spec, with_attention, with_experts
from meshlm.architectures.weights import ExpertNames, transformer_weights
from meshlm.protocol.model import ModelSpec

FAMILY = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    spec=windowed_spec,
    weights=transformer_weights,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},
)


def _ministral_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    layers = config["num_hidden_layers"]
    window, sliding = sliding_layers(
        config, layers + 1 if type(layers) is int else 1
    )  # all, unless the file names them
    return with_attention(dense_spec(config, architecture), sliding, sliding_window=window)


MINISTRAL = Family(
    architecture="MinistralForCausalLM",
    model_type="ministral",
    spec=_ministral_spec,
    weights=transformer_weights,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
)


_BETA, _CONTEXT = "llama_4_scaling_beta", "max_position_embeddings"
_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "original_max_position_embeddings": 16384} | {
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    _BETA: 0.1,
}


def _ministral3_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
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


MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    spec=_ministral3_spec,
    weights=transformer_weights,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144},
    gguf=GGUFFamily(
        "mistral3",
        _gguf,
        frozenset(("rope.scaling.yarn_log_multiplier", "attention.temperature_scale")),
        interleaved_heads=True,
    ),
    compiles=False,
    model="meshlm.workers.models.llama_variants:Ministral3",
)


MIXTRAL_NAMES = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.{}", "w1", "w3", "w2")


def _mixtral_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    moe = replace(moe_spec(config, "num_local_experts", "intermediate_size"), norm_topk_prob=True)
    return with_experts(windowed_spec(config, architecture), moe)


def _mixtral_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return with_experts(dense_gguf(metadata, architecture), gguf_moe(metadata, norm_topk_prob=True))


MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    spec=_mixtral_spec,
    weights=lambda spec: transformer_weights(spec, experts=MIXTRAL_NAMES),
    keys=frozenset(("num_local_experts", "num_experts_per_tok", "router_jitter_noise")),
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-5}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    gguf=GGUFFamily("llama", _mixtral_gguf, GGUF_KEYS, experts=True, interleaved_heads=True),
    compiles=False,
)
FAMILIES = (FAMILY, MINISTRAL, MINISTRAL3, MIXTRAL)
