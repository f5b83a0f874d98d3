"""MPT (MosaicML 2023): ALiBi, norms and products without biases."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.bloom import mpt_slopes, without_rotation
from meshlm.architectures.config_keys import check
from meshlm.architectures.config_values import boolean, integer, number, shown, words
from meshlm.architectures.family import GGUFMetadata
from meshlm.architectures.layer_norms import FUSED, layer_norm_form, layer_norm_gguf, layer_norm_spec, named, renaming
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
}
# What transformers' class computes whatever a file says; files that say otherwise mean another model.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attn_type": ("multihead_attention",),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "attn_uses_sequence_id": (False,),
    "alibi": (True,),
}
_NEEDLESS = words("attn_impl attn_pdrop clip_qkv softmax_scale alibi_bias_max model_type")


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    attention = config.get("attn_config")
    if not isinstance(attention, dict):
        raise ValueError(f"attn_config must be an object, got {shown(attention)}")
    unknown = check(attention, f"attn_config of {architecture}", _ONLY.keys() | _NEEDLESS)
    if unknown:
        raise ValueError(f"attn_config.{unknown[0]} {shown(attention[unknown[0]])} is not supported for {architecture}")
    for key, value in attention.items():
        if key in _ONLY and value is not None and value not in _ONLY[key]:
            raise ValueError(f"attn_config.{key} {shown(value)} is not supported; supported: {shown(_ONLY[key][0])}")
    if attention.get("alibi") is not True:
        raise ValueError(f"attn_config.alibi must be true for {architecture}: learned positions are not supported")
    if config.get("norm_type") not in (None, "layernorm", "low_precision_layernorm"):
        raise ValueError(f"norm_type {shown(config['norm_type'])} is not supported; supported: layernorm")
    if config.get("no_bias") is False:
        raise ValueError(f"no_bias false is not supported for {architecture}")
    if config.get("logit_scale") is not None:
        raise ValueError(f"logit_scale {shown(config['logit_scale'])} is not supported for {architecture}")
    config = named(config, _NAMES)
    hidden = integer(config, "hidden_size")
    made = {
        "intermediate_size": integer(config, "expansion_ratio") * hidden,
        "hidden_act": "gelu",
        "attention_bias": boolean(config, "bias"),
    }
    spec = layer_norm_spec({**config, **made}, architecture, LayerNormSpec(), eps="layer_norm_epsilon", grouped=False)
    scale = number(attention.get("softmax_scale") or 0.0, "attn_config.softmax_scale")
    most = number(attention.get("alibi_bias_max", 8), "attn_config.alibi_bias_max")
    found = replace(
        spec,
        norm_bias=False,
        clip_qkv=number(attention.get("clip_qkv") or 0.0, "attn_config.clip_qkv"),
        query_pre_attn_scalar=scale**-2 if scale else 0.0,
        alibi_slopes=mpt_slopes(spec.num_attention_heads, most),
    )
    return without_rotation(found)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec = layer_norm_gguf(metadata, architecture, LayerNormSpec(), "gelu")
    found = replace(
        spec,
        clip_qkv=float(metadata.get("attention.clamp_kqv", 0.0)),
        alibi_slopes=mpt_slopes(spec.num_attention_heads, float(metadata.get("attention.max_alibi_bias"))),
    )
    return without_rotation(found)


_OUTSIDE = {"wte": "model.embed_tokens", "norm_f": "model.norm"}
DENSE = FUSED._replace(
    architecture="MptForCausalLM",
    model_type="mpt",
    spec=_spec,
    keys=words("""
        d_model n_layers n_heads expansion_ratio max_seq_len attn_config no_bias learned_pos_emb logit_scale
        layer_norm_epsilon emb_pdrop init_device embedding_fraction norm_type init_config verbose fc_type ffn_config
        use_pad_tok_in_ffn tokenizer_name
    """),
    defaults={
        "expansion_ratio": 4,
        "max_seq_len": 2048,
        "layer_norm_epsilon": 1e-5,
        "attn_config": {"alibi": True},
        "tie_word_embeddings": True,
    },
    rename=renaming(
        r"blocks\.",
        _OUTSIDE,
        {
            "norm_1": "input_layernorm",
            "norm_2": "post_attention_layernorm",
            "attn.Wqkv": "self_attn.qkv_proj",
            "attn.out_proj": "self_attn.o_proj",
            "ffn.up_proj": "mlp.up_proj",
            "ffn.down_proj": "mlp.down_proj",
        },
        "transformer.",
    ),
    gguf=layer_norm_form("mpt", _gguf, "attention.clamp_kqv", "attention.max_alibi_bias"),
)
FAMILIES = (DENSE, DENSE._replace(architecture="MPTForCausalLM", gguf=None))
