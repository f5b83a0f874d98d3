"""Phi-1, 1.5 and 2 (Gunasekar et al. 2023): attention and MLP beside one another behind one norm; everything has a bias.
Phi-3 and Phi-4 (Abdin et al. 2024): a Llama whose checkpoints hold query, key and value in one tensor, gate and up in another.
Phi-3.5-MoE (Abdin et al. 2024): layer norms, and experts that SparseMixer chooses (workers/models/layer_norm.py).
"""

from functools import partial
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, number, words
from meshlm.architectures.dense import dense_gguf, one_window, partly_rotated, windowed_spec
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError
from meshlm.architectures.layer_norms import LAYER_NORMS, layer_norm_form, layer_norm_spec, layer_norm_weights, renaming
from meshlm.architectures.layers import GGUF_KEYS, gguf_moe, moe_spec, with_attention, with_experts
from meshlm.architectures.llama import MIXTRAL_NAMES
from meshlm.architectures.weights import GGUF_GATE_UP, fused_gate_up, transformer_weights
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_ORDER = LayerNormSpec(parallel=1, head_bias=True)


def _phi_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    biased = {**config, "attention_bias": True, "mlp_bias": True}
    return layer_norm_spec(biased, architecture, _ORDER, eps="layer_norm_eps")


PHI = LAYER_NORMS._replace(
    architecture="PhiForCausalLM",
    model_type="phi",
    spec=_phi_spec,
    keys=words("layer_norm_eps"),
    defaults={"partial_rotary_factor": 0.5, "max_position_embeddings": 2048}
    | {"layer_norm_eps": 1e-5, "hidden_act": "gelu_new"},
    rename=renaming(
        r"model\.layers\.",
        {"model.final_layernorm": "model.norm"},
        {"self_attn.dense": "self_attn.o_proj", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"},
    ),
    gguf=layer_norm_form("phi2", _ORDER),
)


def _phi3_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = windowed_spec(config, architecture)
    if spec.rope.rope_type == "yarn":
        raise ValueError("rope_type yarn means longrope in old files of this family; name it so")
    return spec


def _phi3_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """llama.cpp's own code takes every layer to see all; the window of the file is what the model was trained with."""
    return partly_rotated(with_long_factors(dense_gguf(metadata, architecture), metadata), metadata)


def with_long_factors(spec: ModelSpec, metadata: GGUFMetadata) -> ModelSpec:
    """The spec with the window and the factors of rotation that a .gguf file of this family has. MetadataError."""
    get = metadata.get
    window = int(get("attention.sliding_window", 0))
    spec = with_attention(spec, sliding_window=window if 0 < window < spec.max_position_embeddings else 0)
    short, long = metadata.long_factors
    if short or long:
        if len(short) != len(long):
            raise MetadataError(
                f"rope_factors_short.weight has {len(short)} numbers, rope_factors_long.weight {len(long)}"
            )
        rope = replace(
            spec.rope,
            rope_type="longrope",
            short_factor=short,
            long_factor=long,
            original_max_position_embeddings=int(get("rope.scaling.original_context_length")),
            attention_factor=float(get("rope.scaling.attn_factor", 1.0)),
        )
        spec = replace(spec, rope=rope)
    return spec


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    spec=_phi3_spec,
    weights=lambda spec: fused_gate_up(transformer_weights(spec)),
    packed={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
    defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    gguf=GGUFFamily(
        "phi3", _phi3_gguf, frozenset(("attention.sliding_window", "rope.scaling.attn_factor")), packed=GGUF_GATE_UP
    ),
)
_JITTER = 0.01
_MSCALES = ("short_mscale", "long_mscale")


def _phimoe_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
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


def _phimoe_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """The window of the file is what the model was trained with, as Phi-3's."""
    spec = with_long_factors(dense_gguf(metadata, architecture), metadata)
    order = LayerNormSpec(gated=True, head_bias="output.bias" in metadata.shapes)
    spec = replace(partly_rotated(spec, metadata), norm_bias=True, layer_norms=order)
    return with_experts(spec, gguf_moe(metadata, sparse_mixer=_JITTER))


_FAMILY = Family(
    architecture="PhimoeForCausalLM",
    model_type="phimoe",
    spec=_phimoe_spec,
    weights=partial(layer_norm_weights, experts=MIXTRAL_NAMES),
    keys=words("lm_head_bias num_local_experts num_experts_per_tok router_jitter_noise input_jitter_noise"),
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6, "max_position_embeddings": 131072}
    | {"rms_norm_eps": 1e-5, "hidden_act": "silu"}
    | {"num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": _JITTER},
    gguf=GGUFFamily(
        "phimoe",
        _phimoe_gguf,
        GGUF_KEYS | frozenset(("attention.sliding_window", "rope.scaling.attn_factor")),
        experts=True,
    ),
    model="meshlm.workers.models.layer_norm:PhiMoE",
)
_PHIMOE_FAMILIES = (_FAMILY, _FAMILY._replace(architecture="PhiMoEForCausalLM", gguf=None))
FAMILIES = (PHI, PHI3, *_PHIMOE_FAMILIES)
