"""Qwen (Bai et al. 2023): a Llama with biases of query, key and value.

Its own code changes the rotation, and lengthens queries, where a text is longer than `seq_length`; that is the context here.
Folders of this family have a vocabulary for tiktoken, which is not read: a tokenizer.json beside it is, and a .gguf file has one.
"""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, number, shown, words
from meshlm.architectures.dense import dense_gguf, dense_spec, partial_factor
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata
from meshlm.architectures.layer_norms import QKV, named, renaming
from meshlm.architectures.layers import with_mlps
from meshlm.architectures.weights import GGUF_QKV, transformer_weights
from meshlm.protocol.model import ModelSpec

_NAMES = {
    "rms_norm_eps": "layer_norm_epsilon",
    "head_dim": "kv_channels",
    "rope_theta": "rotary_emb_base",
    "max_position_embeddings": "seq_length",
}


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
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


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """The feed_forward_length of a file is that of gate and up together."""
    spec = dense_gguf(metadata, architecture)
    spec = replace(spec, attention_bias="blk.0.attn_qkv.bias" in metadata.shapes)
    return with_mlps(spec, intermediate_size=spec.intermediate_size // 2)


FAMILY = Family(
    architecture="QWenLMHeadModel",
    model_type="qwen",
    spec=_spec,
    weights=transformer_weights,
    keys=frozenset(_NAMES.values())
    | words("no_bias rotary_pct scale_attn_weights use_dynamic_ntk use_logn_attn softmax_in_fp32 fp32 fp16 bf16"),
    defaults={
        "layer_norm_epsilon": 1e-6,
        "kv_channels": 128,
        "rotary_emb_base": 10000.0,
        "rotary_pct": 1.0,
        "seq_length": 2048,
        "no_bias": True,
    },
    packed=QKV,
    rename=renaming(
        r"transformer\.h\.",
        {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm"},
        {
            "ln_1": "input_layernorm",
            "ln_2": "post_attention_layernorm",
            "attn.c_attn": "self_attn.qkv_proj",
            "attn.c_proj": "self_attn.o_proj",
            "mlp.w1": "mlp.up_proj",
            "mlp.w2": "mlp.gate_proj",
            "mlp.c_proj": "mlp.down_proj",
        },
    ),
    gguf=GGUFFamily("qwen", _gguf, packed=GGUF_QKV),
)
