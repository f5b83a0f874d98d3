"""GLM-4 of 2024, as transformers has it (GLM Team 2024): a Llama that turns half of each head, neighbour by neighbour.
GLM-4-0414 and GLM-Z1 (GLM Team 2025): GLM with norms behind attention and MLP, too.

GLM-4.5, 4.6 and 4.7 (GLM Team 2025): experts scored by sigmoids behind some dense layers, and half of each head is turned.
The layer behind the last, which drafts further tokens, is a model of its own (drafters.py).

Solar Open (Upstage 2026): GLM-4.5 with experts in every layer and whole heads turned.
dots.llm1 (rednote-hilab 2025): experts scored by sigmoids, query and key heads normed; layers may slide.
MiniMax-M2 (MiniMax 2025): experts that are scored by sigmoids and chosen with a correction bias; norms over all heads together.
Files name them as Mixtral's do. The modules that draft further tokens (MTP) are not loaded.
"""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from msgspec.structs import replace

from meshlm.architectures import weights
from meshlm.architectures.config_values import boolean, integer, only_these, refuse_quantised, shown, words
from meshlm.architectures.deepseek import DEEPSEEK_NAMES, GGUF_EXPERT_KEYS, with_gguf_experts, with_routed_experts
from meshlm.architectures.dense import dense_gguf, dense_spec, full_spec, one_window, partly_rotated
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, NextN, Weight
from meshlm.architectures.layers import moe_spec, with_attention, with_experts
from meshlm.architectures.llama import MIXTRAL_NAMES
from meshlm.architectures.olmo import olmo_attention
from meshlm.architectures.qwen import windows
from meshlm.protocol.layers import MoESpec
from meshlm.protocol.model import ModelSpec

DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True} | {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
}
PACKED = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}


def glm_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """The ModelSpec of GLM and GLM-4-0414. KeyError, ValueError."""
    refuse_quantised(config, architecture, "heads rotate neighbours")
    return replace(full_spec({**config, "mlp_bias": False}, architecture), output_bias=False)


def glm_weights(spec: ModelSpec, norms: weights.Norms = weights.PRE_NORMS) -> Iterator[Weight]:
    return weights.rotating_neighbours(spec, weights.fused_gate_up(weights.transformer_weights(spec, norms)))


def glm_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec = partly_rotated(dense_gguf(metadata, architecture), metadata)
    fused = "blk.0.attn_qkv.bias" in metadata.shapes
    return replace(spec, attention_bias=spec.attention_bias or fused, output_bias=False)


GLM = Family(
    architecture="GlmForCausalLM", model_type="glm", spec=glm_spec, weights=glm_weights, packed=PACKED,
    defaults=DEFAULTS, gguf=GGUFFamily("chatglm", glm_gguf, packed=weights.GGUF_GATE_UP),
)  # fmt: skip
_NORMS: weights.Norms = (
    ("input_layernorm", "attn_norm", "input_norm"),
    ("post_self_attn_layernorm", "post_attention_norm", "attention_out_norm"),
    ("post_attention_layernorm", "ffn_norm", "post_norm"),
    ("post_mlp_layernorm", "post_ffw_norm", "mlp_out_norm"),
)
GLM4 = Family(
    architecture="Glm4ForCausalLM", model_type="glm4", spec=glm_spec, weights=partial(glm_weights, norms=_NORMS),
    packed=PACKED, defaults=DEFAULTS, gguf=GGUFFamily("glm4", glm_gguf, packed=weights.GGUF_GATE_UP),
    model="meshlm.workers.models.gemma:Sandwich",
)  # fmt: skip
_GLM_FAMILIES = (GLM, GLM4)
DRAFTS = ("num_nextn_predict_layers", "num_mtp_layers")  # older files, newer files
SIGMOID = MoESpec(
    num_experts=1, num_experts_per_tok=1, moe_intermediate_size=1, scoring_func="sigmoid", group_score="top2",
    correction_bias=True,
)  # fmt: skip
KEYS = words("""
    n_routed_experts n_shared_experts num_experts_per_tok moe_intermediate_size first_k_dense_replace n_group topk_group
    norm_topk_prob routed_scaling_factor use_qk_norm
""")


def sigmoid_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """A dense spec with experts that are scored by sigmoids. KeyError, ValueError."""
    spec = dense_spec({**config, "mlp_bias": False}, architecture)
    moe = replace(SIGMOID, norm_topk_prob=boolean(config, "norm_topk_prob"))
    return with_routed_experts(config, spec, moe)


def sigmoid_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """A spec whose experts are scored by sigmoids, unless the .gguf file says otherwise. MetadataError."""
    spec = dense_gguf(metadata, architecture)
    spec = replace(spec, qk_norm="blk.0.attn_q_norm.weight" in metadata.shapes)
    return partly_rotated(with_gguf_experts(metadata, spec, plain=2), metadata)


def _glm4_moe_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = sigmoid_spec(config, architecture)
    one_window(config, spec, slides=False)
    drafts = max(integer(config, key, 0) for key in DRAFTS)
    return replace(spec, output_bias=False, qk_norm=boolean(config, "use_qk_norm"), num_nextn_predict_layers=drafts)


GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    spec=_glm4_moe_spec,
    weights=partial(weights.transformer_weights, norms=weights.POST_ATTENTION_NORMS, experts=DEEPSEEK_NAMES),
    keys=KEYS | set(DRAFTS),
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "partial_rotary_factor": 0.5}
    | {"rms_norm_eps": 1e-5}
    | {"moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128}
    | {"first_k_dense_replace": 1, "norm_topk_prob": True},
    gguf=GGUFFamily("glm4moe", sigmoid_gguf, GGUF_EXPERT_KEYS, experts=True),
    compiles=False,
    nextn=NextN("meshlm.workers.models.drafters:NextN"),
)


def _solar_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = sigmoid_spec({**config, "first_k_dense_replace": 0, "intermediate_size": 1}, architecture)
    one_window(config, spec, slides=False)
    return replace(spec, output_bias=False)


SOLAR_OPEN = Family(
    architecture="SolarOpenForCausalLM",
    model_type="solar_open",
    spec=_solar_spec,
    weights=partial(weights.transformer_weights, experts=DEEPSEEK_NAMES),
    keys=KEYS - words("first_k_dense_replace use_qk_norm"),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 1e6}
    | {"rms_norm_eps": 1e-5, "moe_intermediate_size": 1280, "num_experts_per_tok": 8, "n_shared_experts": 1}
    | {"n_routed_experts": 128, "norm_topk_prob": True},
    compiles=False,
)


def _dots1_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    for key, known in (("topk_method", ("noaux_tc",)), ("scoring_func", ("noaux_tc", "sigmoid"))):
        if config.get(key, known[0]) not in known:
            raise ValueError(f"{key} {shown(config[key])} is not supported; supported: {', '.join(known)}")
    spec = replace(sigmoid_spec(config, architecture), qk_norm=True)
    window, sliding = windows({**config, "use_sliding_window": True})
    return with_attention(spec, sliding, sliding_window=window)


DOTS1 = Family(
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    spec=_dots1_spec,
    weights=partial(weights.transformer_weights, experts=DEEPSEEK_NAMES),
    keys=(KEYS - {"use_qk_norm"}) | words("moe_layer_freq scoring_func topk_method"),
    defaults={"num_key_value_heads": 32, "max_position_embeddings": 2048, "sliding_window": 4096}
    | {"max_window_layers": 62},
    gguf=GGUFFamily("dots1", sigmoid_gguf, GGUF_EXPERT_KEYS, experts=True),
    compiles=False,
)
_WANTED: dict[str, Any] = {
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
}
_WANTED |= dict.fromkeys(words("layernorm_full_attention_beta layernorm_linear_attention_beta layernorm_mlp_beta"), 1.0)
_WANTED["shared_intermediate_size"] = 0
_BIAS = re.compile(r"(model\.layers\.\d+\.)(?:block_sparse_moe|mlp)\.(?:gate\.)?(e_score_correction_bias)")


def _minimax_m2_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    only_these(config, _WANTED, architecture)
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


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec = dense_gguf(metadata, architecture)
    return partly_rotated(with_gguf_experts(metadata, spec, plain=2, norm_topk_prob=True), metadata)


def _renamed(name: str) -> str:
    return _BIAS.sub(rf"\1{MIXTRAL_NAMES.router}.\2", name)


MINIMAX_M2 = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    spec=_minimax_m2_spec,
    weights=partial(weights.transformer_weights, attention=olmo_attention, experts=MIXTRAL_NAMES),
    keys=frozenset(_WANTED)
    | words("""
        attn_type_list rotary_dim num_local_experts num_experts_per_tok router_jitter_noise use_mtp num_mtp_modules
        mtp_transformer_layers mlp_intermediate_size shared_moe_mode
    """),
    defaults={"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5e6}
    | {"num_local_experts": 256, "num_experts_per_tok": 8},
    rename=_renamed,
    unread=r"(model\.)?mtp.*",
    gguf=GGUFFamily("minimax-m2", _gguf, GGUF_EXPERT_KEYS, experts=True),
    model="meshlm.workers.models.post_norm:Olmoe",
)
FAMILIES = (*_GLM_FAMILIES, GLM4_MOE, SOLAR_OPEN, DOTS1, MINIMAX_M2)
