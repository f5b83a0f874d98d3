"""Qwen2 (Yang et al. 2024): biases of query, key and value; the layers from max_window_layers on may slide.
Qwen3 (Yang et al. 2025): norms of query and key heads in place of Qwen2's biases.
Qwen2-MoE (Yang et al. 2024): Qwen2 with many small experts, and one that every token goes to, behind a sigmoid gate.
Qwen3-MoE (Yang et al. 2025): Qwen3 with many small experts and none that every token goes to.
Qwen (Bai et al. 2023): a Llama with biases of query, key and value.

Its own code changes the rotation, and lengthens queries, where a text is longer than `seq_length`; that is the context here.
Folders of this family have a vocabulary for tiktoken, which is not read: a tokenizer.json beside it is, and a .gguf file has one.
"""

from functools import partial
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, number, pairs, shown, words
from meshlm.architectures.dense import dense_gguf, dense_spec, layer_types, one_window, partial_factor, sliding_window
from meshlm.architectures.family import ExpertTensors, Family, GGUFFamily, GGUFMetadata
from meshlm.architectures.layer_norms import QKV, named, renaming
from meshlm.architectures.layers import (
    GGUF_KEYS,
    gguf_moe,
    layers_with_experts,
    moe_spec,
    with_attention,
    with_experts,
    with_mlps,
)
from meshlm.architectures.weights import GGUF_QKV, transformer_weights
from meshlm.protocol.model import ModelSpec

QWEN2_DEFAULTS = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _qwen2_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    window, sliding = windows(config)
    spec = dense_spec(config, architecture)
    return with_attention(replace(spec, attention_bias=True, output_bias=False), sliding, sliding_window=window)


def windows(config: dict[str, Any]) -> tuple[int, tuple[bool, ...]]:
    """The window, and which layers use it. ValueError."""
    window, kinds, layers = sliding_window(config), layer_types(config), integer(config, "num_hidden_layers")
    if not boolean(config, "use_sliding_window"):
        window = 0
    if kinds is None:
        first = integer(config, "max_window_layers", layers)
        sliding = [layer >= first for layer in range(layers)]
    else:
        sliding = [kind == "sliding_attention" for kind in kinds]
    return (window, tuple(sliding)) if window and any(sliding) else (0, ())


QWEN2 = Family(
    architecture="Qwen2ForCausalLM", model_type="qwen2", spec=_qwen2_spec, weights=transformer_weights,
    defaults=QWEN2_DEFAULTS, gguf=GGUFFamily("qwen2", dense_gguf),
)  # fmt: skip


def _qwen3_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    window, sliding = windows(config)
    return with_attention(replace(dense_spec(config, architecture), qk_norm=True), sliding, sliding_window=window)


QWEN3 = Family(
    architecture="Qwen3ForCausalLM", model_type="qwen3", spec=_qwen3_spec, weights=transformer_weights,
    defaults={**QWEN2_DEFAULTS, "head_dim": 128}, gguf=GGUFFamily("qwen3", partial(dense_gguf, qk_norm=True)),
)  # fmt: skip
KEYS = frozenset(
    ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")
    + ("mlp_only_layers", "shared_expert_intermediate_size", "qkv_bias")
)
QWEN2_MOE_DEFAULTS = (
    {"num_key_value_heads": 16, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
    | {"qkv_bias": True}
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4}
    | {"num_experts": 60}
)


def _qwen2_moe_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    shared = integer(config, "shared_expert_intermediate_size")
    moe = replace(moe_spec(config), shared_intermediate_size=shared, shared_gate=shared > 0)
    window, sliding = _windows(config)
    spec = replace(dense_spec(config, architecture), attention_bias=boolean(config, "qkv_bias"), output_bias=False)
    spec = with_attention(spec, sliding, sliding_window=window)
    return with_experts(spec, moe, layers_with_experts(config))


def _windows(config: dict[str, Any]) -> tuple[int, tuple[bool, ...]]:
    """The window, and which layers use it: unless the file names them, every other one of the first. ValueError."""
    if not boolean(config, "use_sliding_window"):
        return 0, ()
    window, kinds, first = sliding_window(config), layer_types(config), integer(config, "max_window_layers")
    layers = range(integer(config, "num_hidden_layers"))
    sliding = tuple(
        layer % 2 == 0 and layer < first if kinds is None else kinds[layer] == "sliding_attention" for layer in layers
    )
    return (window, sliding) if window and any(sliding) else (0, ())


def _qwen2_moe_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    shared = int(metadata.get("expert_shared_feed_forward_length", 0))
    moe = gguf_moe(metadata, shared_intermediate_size=shared, shared_gate=shared > 0)
    return with_experts(dense_gguf(metadata, architecture), moe)


QWEN2_MOE = Family(
    architecture="Qwen2MoeForCausalLM", model_type="qwen2_moe", spec=_qwen2_moe_spec, weights=transformer_weights,
    keys=KEYS, defaults=QWEN2_MOE_DEFAULTS,
    gguf=GGUFFamily("qwen2moe", _qwen2_moe_gguf, GGUF_KEYS | {"expert_shared_feed_forward_length"}, experts=True),
    compiles=False,
)  # fmt: skip
QWEN3_MOE_DEFAULTS = {"num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096} | {
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}


def _qwen3_moe_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec, slides = dense_spec(config, architecture), boolean(config, "use_sliding_window")
    window = one_window(config, spec, slides=True) if slides else 0
    spec = with_attention(replace(spec, qk_norm=True), sliding_window=window)
    return with_experts(spec, moe_spec(_one_count(config)), layers_with_experts(config))


def _one_count(config: dict[str, Any]) -> dict[str, Any]:
    known = [config[key] for key in ("num_experts", "num_local_experts") if config.get(key) is not None]
    if any(count != known[0] for count in known):
        raise ValueError(f"num_experts and num_local_experts differ: {known[0]}, {known[1]}")
    return {**config, "num_experts": known[0] if known else 128}


def _qwen3_moe_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return with_experts(dense_gguf(metadata, architecture, qk_norm=True), gguf_moe(metadata, norm_topk_prob=True))


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", spec=_qwen3_moe_spec, weights=transformer_weights,
    keys=KEYS - {"shared_expert_intermediate_size", "qkv_bias"} | {"num_local_experts"}, defaults=QWEN3_MOE_DEFAULTS,
    gguf=GGUFFamily("qwen3moe", _qwen3_moe_gguf, GGUF_KEYS, experts=True), compiles=False,
    experts=ExpertTensors("mlp.experts.{}", "mlp.experts.gate_up_proj", "mlp.experts.down_proj", interleaved=False),
)  # fmt: skip
_NAMES = pairs("""
    rms_norm_eps=layer_norm_epsilon head_dim=kv_channels rope_theta=rotary_emb_base
    max_position_embeddings=seq_length
""")


def _qwen_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    if config.get("scale_attn_weights", True) is not True:
        raise ValueError(
            f"scale_attn_weights {shown(config['scale_attn_weights'])} is not supported for {architecture}"
        )
    biased = not boolean(config, "no_bias")
    config = named(config, _NAMES)
    wide, dim = integer(config, "intermediate_size"), integer(config, "head_dim")
    if wide % 2:
        raise ValueError(f"intermediate_size is {wide}; it must be even: gate and up have half of it each")
    rotary = int(dim * number(config["rotary_pct"], "rotary_pct"))
    config |= {
        "intermediate_size": wide // 2,
        "partial_rotary_factor": partial_factor(rotary, dim),
        "attention_bias": True,
        "mlp_bias": biased,
    }
    return replace(dense_spec(config, architecture), output_bias=biased)


def _qwen_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """The feed_forward_length of a file is that of gate and up together."""
    spec = dense_gguf(metadata, architecture)
    spec = replace(spec, attention_bias="blk.0.attn_qkv.bias" in metadata.shapes)
    return with_mlps(spec, intermediate_size=spec.intermediate_size // 2)


QWEN = Family(
    architecture="QWenLMHeadModel",
    model_type="qwen",
    spec=_qwen_spec,
    weights=transformer_weights,
    keys=frozenset(_NAMES.values())
    | words("no_bias rotary_pct scale_attn_weights use_dynamic_ntk use_logn_attn softmax_in_fp32 fp32 fp16 bf16"),
    defaults={"rotary_emb_base": 10000.0, "rotary_pct": 1.0, "seq_length": 2048}
    | {"layer_norm_epsilon": 1e-6, "kv_channels": 128, "no_bias": True},
    packed=QKV,
    rename=renaming(
        r"transformer\.h\.",
        {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm"},
        pairs("""
            ln_1=input_layernorm ln_2=post_attention_layernorm attn.c_attn=self_attn.qkv_proj
            attn.c_proj=self_attn.o_proj mlp.w1=mlp.up_proj mlp.w2=mlp.gate_proj mlp.c_proj=mlp.down_proj
        """),
    ),
    gguf=GGUFFamily("qwen", _qwen_gguf, packed=GGUF_QKV),
)
FAMILIES = (QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, QWEN)
