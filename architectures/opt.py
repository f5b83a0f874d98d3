"""OPT (Zhang et al. 2022): learned positions, of which the first token has the third.

OPT-350m has norms behind the sums, and projects its embeddings.
"""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, words
from meshlm.architectures.layer_norms import LAYER_NORMS, layer_norm_spec, renaming
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_OFFSET = 2


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    for key in ("enable_bias", "layer_norm_elementwise_affine"):
        if config.get(key) is False:
            raise ValueError(f"{key} false is not supported for {architecture}")
    if boolean(config, "_remove_final_layer_norm"):
        raise ValueError(f"_remove_final_layer_norm true is not supported for {architecture}")
    hidden = integer(config, "hidden_size")
    each = integer(config, "word_embed_proj_dim", hidden)
    order = LayerNormSpec(
        learned_positions=True,
        after=config.get("do_layer_norm_before") is False,
        embedding_dim=0 if each == hidden else each,
    )
    wide = {"intermediate_size": integer(config, "ffn_dim"), "attention_bias": True, "mlp_bias": True}
    biased, keys = {**config, **wide, "layer_norm_eps": 1e-5}, {"eps": "layer_norm_eps", "act": "activation_function"}
    spec = layer_norm_spec(biased, architecture, order, **keys, grouped=False)
    return replace(spec, position_offset=_OFFSET)


_OUTSIDE = {
    "embed_tokens": "model.embed_tokens",
    "embed_positions": "model.embed_positions",
    "final_layer_norm": "model.norm",
    "project_in": "model.project_in",
    "project_out": "model.project_out",
}
FAMILY = LAYER_NORMS._replace(
    architecture="OPTForCausalLM",
    model_type="opt",
    spec=_spec,
    keys=words("""
        ffn_dim word_embed_proj_dim do_layer_norm_before activation_function enable_bias layer_norm_elementwise_affine
        _remove_final_layer_norm
    """),
    defaults={
        "ffn_dim": 3072,
        "activation_function": "relu",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    rename=renaming(
        r"(?:model\.)?decoder\.layers\.",
        {f"{prefix}decoder.{stem}": ours for stem, ours in _OUTSIDE.items() for prefix in ("model.", "")},
        {
            "self_attn.out_proj": "self_attn.o_proj",
            "self_attn_layer_norm": "input_layernorm",
            "final_layer_norm": "post_attention_layernorm",
            "fc1": "mlp.up_proj",
            "fc2": "mlp.down_proj",
        },
    ),
)
