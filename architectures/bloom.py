"""BLOOM (BigScience 2022): ALiBi, and embeddings that are normed.

ALiBi (Press et al. 2022): attention with linear biases, in the place of positions.
"""

import math
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, words
from meshlm.architectures.family import GGUFMetadata, Layout
from meshlm.architectures.layer_norms import (
    BLOOM_LAYER,
    FUSED,
    layer_norm_form,
    layer_norm_gguf,
    layer_norm_spec,
    named,
    renaming,
)
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
FAMILY = FUSED._replace(
    architecture="BloomForCausalLM",
    model_type="bloom",
    spec=_spec,
    keys=words("""
        n_layer n_head n_embed n_inner seq_length layer_norm_epsilon slow_but_exact offset_alibi masked_softmax_fusion
        attention_softmax_in_fp32 bias_dropout_fusion skip_bias_add skip_bias_add_qkv
    """),
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    layouts={"self_attn.qkv_proj": Layout.BY_GROUP},
    rename=renaming(r"h\.", _OUTSIDE, BLOOM_LAYER, "transformer."),
    gguf=layer_norm_form("bloom", _gguf),
)
