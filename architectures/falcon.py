"""Falcon (Almazrouei et al. 2023): attention and MLP beside one another, behind one norm (7B) or two (40B), or with ALiBi (RW).

Scores have ALiBi's biases before they are divided by the root of a head's size.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.bloom import slopes, without_rotation
from meshlm.architectures.config_values import boolean, integer, shown, words
from meshlm.architectures.family import GGUFMetadata, Layout, Weight
from meshlm.architectures.layer_norms import (
    BLOOM_LAYER,
    FUSED,
    layer_norm_form,
    layer_norm_gguf,
    layer_norm_spec,
    layer_norm_weights,
    named,
    renaming,
)
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}  # of files before transformers had it


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    config = {key: value for key, value in named(config, _NAMES).items() if value is not None}
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
    spec = layer_norm_spec({**config, **made}, architecture, order, eps="layer_norm_epsilon", act="activation")
    if not boolean(config, "alibi"):
        return spec
    return without_rotation(replace(spec, alibi_slopes=slopes(heads, scale=spec.head_dim**-0.5)))


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    norms = 2 if "blk.0.attn_norm_2.weight" in metadata.shapes else 1
    return layer_norm_gguf(metadata, architecture, LayerNormSpec(parallel=norms), "gelu")


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    """llama.cpp calls the MLP's norm attn_norm, and the other attn_norm_2, where there are two beside one another."""
    order = spec.layer_norms
    beside = order is not None and order.parallel == 2
    for weight in layer_norm_weights(spec):
        if beside and ".attn_norm." in weight.gguf:
            weight = weight._replace(gguf=weight.gguf.replace(".attn_norm.", ".attn_norm_2."))
        elif beside and ".ffn_norm." in weight.gguf:
            weight = weight._replace(gguf=weight.gguf.replace(".ffn_norm.", ".attn_norm."))
        yield weight


_OUTSIDE = {"word_embeddings": "model.embed_tokens", "ln_f": "model.norm"}
FAMILY = FUSED._replace(
    architecture="FalconForCausalLM",
    model_type="falcon",
    spec=_spec,
    weights=_weights,
    keys=words("""
        alibi bias multi_query new_decoder_architecture num_kv_heads num_ln_in_parallel_attn parallel_attn activation
        ffn_hidden_size layer_norm_epsilon n_head n_layer
    """),
    defaults={
        "layer_norm_epsilon": 1e-5,
        "activation": "gelu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    layouts={"self_attn.qkv_proj": Layout.BY_GROUP},
    rename=renaming(
        r"h\.",
        _OUTSIDE,
        {"ln_attn": "input_layernorm", "ln_mlp": "post_attention_layernorm", **BLOOM_LAYER},
        "transformer.",
    ),
    gguf=layer_norm_form("falcon", _gguf),
)
