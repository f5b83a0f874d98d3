"""BLOOM (BigScience 2022): ALiBi, and embeddings that are normed."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.alibi import slopes
from meshlm.architectures.config_values import integer, words
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Layout
from meshlm.architectures.layer_norms import (
    BLOOM_LAYER,
    GGUF_EPS,
    MODEL,
    QKV,
    layer_norm_gguf,
    layer_norm_spec,
    layer_norm_weights,
    named,
    renaming,
)
from meshlm.architectures.layers import with_attention
from meshlm.architectures.weights import GGUF_QKV
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "max_position_embeddings": "seq_length"}
_ORDER = LayerNormSpec(embedding_norm=True)
CONTEXT = 2048  # that all published models were made for, where the file does not say


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    config = named({"seq_length": CONTEXT, **config}, _NAMES)
    if config.get("hidden_size") is None:
        config["hidden_size"] = config["n_embed"]
    made = {
        "intermediate_size": 4 * integer(config, "hidden_size"),
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": True,
        "mlp_bias": True,
    }
    spec = layer_norm_spec({**config, **made}, architecture, _ORDER, eps="layer_norm_epsilon", grouped=False)
    return without_rotation(replace(spec, alibi_slopes=slopes(spec.num_attention_heads)))


def without_rotation(spec: ModelSpec) -> ModelSpec:
    """The spec of a model that turns no heads."""
    return with_attention(spec, rotates=False)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec = layer_norm_gguf(metadata, architecture, _ORDER)
    return without_rotation(replace(spec, alibi_slopes=slopes(spec.num_attention_heads)))


_OUTSIDE = {
    "word_embeddings": "model.embed_tokens",
    "word_embeddings_layernorm": "model.embed_norm",
    "ln_f": "model.norm",
}
FAMILY = Family(
    architecture="BloomForCausalLM",
    model_type="bloom",
    spec=_spec,
    weights=layer_norm_weights,
    keys=words("""
        n_layer n_head n_embed n_inner seq_length layer_norm_epsilon slow_but_exact offset_alibi masked_softmax_fusion
        attention_softmax_in_fp32 bias_dropout_fusion skip_bias_add skip_bias_add_qkv
    """),
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    packed=QKV,
    layouts={"self_attn.qkv_proj": Layout.BY_GROUP},
    rename=renaming(r"h\.", _OUTSIDE, BLOOM_LAYER, "transformer."),
    gguf=GGUFFamily("bloom", _gguf, frozenset((GGUF_EPS,)), packed=GGUF_QKV),
    compiles=False,
    model=MODEL,
)
