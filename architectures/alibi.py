"""BLOOM (BigScience 2022): ALiBi, and embeddings that are normed.
ALiBi (Press et al. 2022): attention with linear biases, in the place of positions.

MPT (MosaicML 2023): ALiBi, norms and products without biases.
Falcon (Almazrouei et al. 2023): attention and MLP beside one another, behind one norm (7B) or two (40B), or with ALiBi (RW).
Scores have ALiBi's biases before they are divided by the root of a head's size.
"""

import math
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures import layer_norms
from meshlm.architectures.config_keys import check
from meshlm.architectures.config_values import boolean, integer, number, pairs, shown, words
from meshlm.architectures.family import GGUFMetadata, Layout, Weight
from meshlm.architectures.layers import with_attention
from meshlm.protocol.model import LayerNormSpec, ModelSpec


def slopes(num_heads: int, bias_max: float = 8.0, scale: float = 1.0) -> tuple[float, ...]:
    """The slope of each head: a geometric sequence that ends with 2 ** -bias_max; where the number of heads is no power of two, that of
    the power below it, and every second number of the one for twice as many heads. scale: what all are multiplied by."""

    def sequence(count: int) -> list[float]:
        return [2.0 ** (-bias_max * (head + 1) / count) for head in range(count)]

    below = 2 ** int(math.log2(num_heads))
    found = sequence(below) + sequence(2 * below)[::2][: num_heads - below]
    return tuple(slope * scale for slope in found)


def mpt_slopes(num_heads: int, bias_max: float) -> tuple[float, ...]:
    """MPT's order where the number of heads is no power of two: every second number of the power above it first."""
    above = 2 ** math.ceil(math.log2(num_heads))
    found = [2.0 ** (-bias_max * (head + 1) / above) for head in range(above)]
    return tuple(found if above == num_heads else [*found[1::2], *found[::2]][:num_heads])


_BLOOM_NAMES = pairs("""
    num_hidden_layers=n_layer num_attention_heads=n_head max_position_embeddings=seq_length
""")
_ORDER = LayerNormSpec(embedding_norm=True)
CONTEXT = 2048  # that all published models were made for, where the file does not say


def _bloom_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    config = layer_norms.named({"seq_length": CONTEXT, **config}, _BLOOM_NAMES)
    if config.get("hidden_size") is None:
        config["hidden_size"] = config["n_embed"]
    made = {
        "intermediate_size": 4 * integer(config, "hidden_size"),
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": True,
        "mlp_bias": True,
    }
    spec = layer_norms.layer_norm_spec(
        {**config, **made}, architecture, _ORDER, eps="layer_norm_epsilon", grouped=False
    )
    return with_attention(replace(spec, alibi_slopes=slopes(spec.num_attention_heads)), rotates=False)


def _bloom_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec = layer_norms.layer_norm_gguf(metadata, architecture, _ORDER)
    return with_attention(replace(spec, alibi_slopes=slopes(spec.num_attention_heads)), rotates=False)


_BLOOM_OUTSIDE = pairs("""
    word_embeddings=model.embed_tokens word_embeddings_layernorm=model.embed_norm ln_f=model.norm
""")
BLOOM = layer_norms.FUSED._replace(
    architecture="BloomForCausalLM",
    model_type="bloom",
    spec=_bloom_spec,
    keys=words("""
        n_layer n_head n_embed n_inner seq_length layer_norm_epsilon slow_but_exact offset_alibi masked_softmax_fusion
        attention_softmax_in_fp32 bias_dropout_fusion skip_bias_add skip_bias_add_qkv
    """),
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    layouts={"self_attn.qkv_proj": Layout.BY_GROUP},
    rename=layer_norms.renaming(r"h\.", _BLOOM_OUTSIDE, layer_norms.BLOOM_LAYER, "transformer."),
    gguf=layer_norms.layer_norm_form("bloom", _bloom_gguf),
)
_MPT_NAMES = pairs("""
    hidden_size=d_model num_hidden_layers=n_layers num_attention_heads=n_heads max_position_embeddings=max_seq_len
""")
# What transformers' class computes whatever a file says; files that say otherwise mean another model.
_ONLY: dict[str, tuple[Any, ...]] = {
    "attn_type": ("multihead_attention",),
    "prefix_lm": (False,),
    "qk_ln": (False,),
    "attn_uses_sequence_id": (False,),
    "alibi": (True,),
}
_NEEDLESS = words("attn_impl attn_pdrop clip_qkv softmax_scale alibi_bias_max model_type")


def _mpt_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
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
    config = layer_norms.named(config, _MPT_NAMES)
    hidden = integer(config, "hidden_size")
    made = {
        "intermediate_size": integer(config, "expansion_ratio") * hidden,
        "hidden_act": "gelu",
        "attention_bias": boolean(config, "bias"),
    }
    spec = layer_norms.layer_norm_spec(
        {**config, **made}, architecture, LayerNormSpec(), eps="layer_norm_epsilon", grouped=False
    )
    scale = number(attention.get("softmax_scale") or 0.0, "attn_config.softmax_scale")
    most = number(attention.get("alibi_bias_max", 8), "attn_config.alibi_bias_max")
    found = replace(
        spec,
        norm_bias=False,
        clip_qkv=number(attention.get("clip_qkv") or 0.0, "attn_config.clip_qkv"),
        query_pre_attn_scalar=scale**-2 if scale else 0.0,
        alibi_slopes=mpt_slopes(spec.num_attention_heads, most),
    )
    return with_attention(found, rotates=False)


def _mpt_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec = layer_norms.layer_norm_gguf(metadata, architecture, LayerNormSpec(), "gelu")
    found = replace(
        spec,
        clip_qkv=float(metadata.get("attention.clamp_kqv", 0.0)),
        alibi_slopes=mpt_slopes(spec.num_attention_heads, float(metadata.get("attention.max_alibi_bias"))),
    )
    return with_attention(found, rotates=False)


_MPT_OUTSIDE = {"wte": "model.embed_tokens", "norm_f": "model.norm"}
MPT = layer_norms.FUSED._replace(
    architecture="MptForCausalLM",
    model_type="mpt",
    spec=_mpt_spec,
    keys=words("""
        d_model n_layers n_heads expansion_ratio max_seq_len attn_config no_bias learned_pos_emb logit_scale
        layer_norm_epsilon emb_pdrop init_device embedding_fraction norm_type init_config verbose fc_type ffn_config
        use_pad_tok_in_ffn tokenizer_name
    """),
    defaults={"max_seq_len": 2048, "attn_config": {"alibi": True}}
    | {"expansion_ratio": 4, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    rename=layer_norms.renaming(
        r"blocks\.",
        _MPT_OUTSIDE,
        pairs("""
            norm_1=input_layernorm norm_2=post_attention_layernorm attn.Wqkv=self_attn.qkv_proj
            attn.out_proj=self_attn.o_proj ffn.up_proj=mlp.up_proj ffn.down_proj=mlp.down_proj
        """),
        "transformer.",
    ),
    gguf=layer_norms.layer_norm_form("mpt", _mpt_gguf, "attention.clamp_kqv", "attention.max_alibi_bias"),
)
_MPT_FAMILIES = (MPT, MPT._replace(architecture="MPTForCausalLM", gguf=None))
_FALCON_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}  # of files before transformers had it


def _falcon_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    config = {key: value for key, value in layer_norms.named(config, _FALCON_NAMES).items() if value is not None}
    newer, parallel = boolean(config, "new_decoder_architecture"), config.get("parallel_attn") is not False
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    if newer and not parallel:
        raise ValueError("parallel_attn false is not supported with new_decoder_architecture")
    norms = integer(config, "num_ln_in_parallel_attn", 2 if newer else 1)
    if norms not in (1, 2) or (norms == 2 and not newer):
        raise ValueError(f"num_ln_in_parallel_attn {shown(norms)} is not supported with these keys")
    kv_heads = integer(config, "num_kv_heads", heads)
    if not newer:
        kv_heads = 1 if config.get("multi_query") is not False else heads
    bias = boolean(config, "bias")
    made = {
        "num_key_value_heads": kv_heads,
        "intermediate_size": integer(config, "ffn_hidden_size", 4 * hidden),
        "attention_bias": bias,
        "mlp_bias": bias,
    }
    order = LayerNormSpec(parallel=norms if parallel else 0)
    spec = layer_norms.layer_norm_spec(
        {**config, **made}, architecture, order, eps="layer_norm_epsilon", act="activation"
    )
    if not boolean(config, "alibi"):
        return spec
    return with_attention(replace(spec, alibi_slopes=slopes(heads, scale=spec.head_dim**-0.5)), rotates=False)


def _falcon_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    norms = 2 if "blk.0.attn_norm_2.weight" in metadata.shapes else 1
    return layer_norms.layer_norm_gguf(metadata, architecture, LayerNormSpec(parallel=norms), "gelu")


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    """llama.cpp calls the MLP's norm attn_norm, and the other attn_norm_2, where there are two beside one another."""
    order = spec.layer_norms
    beside = order is not None and order.parallel == 2
    for weight in layer_norms.layer_norm_weights(spec):
        if beside and ".attn_norm." in weight.gguf:
            weight = weight._replace(gguf=weight.gguf.replace(".attn_norm.", ".attn_norm_2."))
        elif beside and ".ffn_norm." in weight.gguf:
            weight = weight._replace(gguf=weight.gguf.replace(".ffn_norm.", ".attn_norm."))
        yield weight


_FALCON_OUTSIDE = {"word_embeddings": "model.embed_tokens", "ln_f": "model.norm"}
FALCON = layer_norms.FUSED._replace(
    architecture="FalconForCausalLM",
    model_type="falcon",
    spec=_falcon_spec,
    weights=_weights,
    keys=words("""
        alibi bias multi_query new_decoder_architecture num_kv_heads num_ln_in_parallel_attn parallel_attn activation
        ffn_hidden_size layer_norm_epsilon n_head n_layer
    """),
    defaults={"max_position_embeddings": 2048}
    | {"layer_norm_epsilon": 1e-5, "activation": "gelu", "tie_word_embeddings": True},
    layouts={"self_attn.qkv_proj": Layout.BY_GROUP},
    rename=layer_norms.renaming(
        r"h\.",
        _FALCON_OUTSIDE,
        {"ln_attn": "input_layernorm", "ln_mlp": "post_attention_layernorm", **layer_norms.BLOOM_LAYER},
        "transformer.",
    ),
    gguf=layer_norms.layer_norm_form("falcon", _falcon_gguf),
)
FAMILIES = (BLOOM, *_MPT_FAMILIES, FALCON)
