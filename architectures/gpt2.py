"""GPT-2 (Radford et al. 2019): learned positions, and matrices that files hold with a row for each input."""

from typing import Any

from meshlm.architectures.config_values import integer, words
from meshlm.architectures.family import GGUFMetadata, Layout
from meshlm.architectures.layer_norms import FUSED, layer_norm_form, layer_norm_gguf, layer_norm_spec, named, renaming
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_ORDER = LayerNormSpec(learned_positions=True)


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    config = named(config, _NAMES)
    config["intermediate_size"] = config.get("n_inner") or 4 * integer(config, "hidden_size")
    biased = {**config, "attention_bias": True, "mlp_bias": True}
    keys = {"eps": "layer_norm_epsilon", "act": "activation_function"}
    return layer_norm_spec(biased, architecture, _ORDER, **keys, grouped=False)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return layer_norm_gguf(metadata, architecture, _ORDER)


_OUTSIDE = {"wte": "model.embed_tokens", "wpe": "model.embed_positions", "ln_f": "model.norm"}
_INSIDE = {
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "attn.c_attn": "self_attn.qkv_proj",
    "attn.c_proj": "self_attn.o_proj",
    "mlp.c_fc": "mlp.up_proj",
    "mlp.c_proj": "mlp.down_proj",
}
FAMILY = FUSED._replace(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    spec=_spec,
    keys=words("""
        n_embd n_layer n_head n_positions n_ctx n_inner activation_function layer_norm_epsilon reorder_and_upcast_attn
        summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    """),
    defaults={
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    layouts=dict.fromkeys((stem for stem in _INSIDE.values() if stem.endswith("proj")), Layout.TRANSPOSED),
    rename=renaming(r"h\.", _OUTSIDE, _INSIDE, "transformer."),
    unread=r"model\.layers\.\d+\.attn\.(masked_)?bias",
    gguf=layer_norm_form("gpt2", _gguf),
)
