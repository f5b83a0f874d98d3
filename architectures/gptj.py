"""GPT-J (Wang and Komatsuzaki 2021): attention and MLP beside one another behind one norm, a part of each head turned."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, refuse_quantised, words
from meshlm.architectures.dense import partial_factor
from meshlm.architectures.family import Weight
from meshlm.architectures.layer_norms import LAYER_NORMS, layer_norm_spec, layer_norm_weights, named, renaming
from meshlm.architectures.weights import rotating_neighbours
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_ORDER = LayerNormSpec(parallel=1, head_bias=True)


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    refuse_quantised(config, architecture, "heads rotate neighbours")
    config = named(config, _NAMES)
    wide = config.get("n_inner") or 4 * integer(config, "hidden_size")
    made = {**config, "intermediate_size": wide, "attention_bias": False, "mlp_bias": True}
    keys = {"eps": "layer_norm_epsilon", "act": "activation_function"}
    spec = layer_norm_spec(made, architecture, _ORDER, **keys, grouped=False)
    rotary = integer(config, "rotary_dim", spec.head_dim)
    if not 0 < rotary <= spec.head_dim:
        raise ValueError(f"rotary_dim is {rotary}; heads have {spec.head_dim} numbers")
    return replace(spec, rope=replace(spec.rope, partial_rotary_factor=partial_factor(rotary, spec.head_dim)))


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    return rotating_neighbours(spec, layer_norm_weights(spec))


_OUTSIDE = {"wte": "model.embed_tokens", "ln_f": "model.norm"}
FAMILY = LAYER_NORMS._replace(
    architecture="GPTJForCausalLM",
    model_type="gptj",
    spec=_spec,
    weights=_weights,
    keys=words("""
        n_embd n_layer n_head n_positions n_ctx n_inner rotary rotary_dim activation_function layer_norm_epsilon
        summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    """),
    defaults={"n_positions": 2048, "rotary_dim": 64, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
    rename=renaming(
        r"h\.",
        _OUTSIDE,
        {
            "ln_1": "input_layernorm",
            "attn.q_proj": "self_attn.q_proj",
            "attn.k_proj": "self_attn.k_proj",
            "attn.v_proj": "self_attn.v_proj",
            "attn.out_proj": "self_attn.o_proj",
            "mlp.fc_in": "mlp.up_proj",
            "mlp.fc_out": "mlp.down_proj",
        },
        "transformer.",
    ),
    unread=r"model\.layers\.\d+\.attn\.(masked_)?bias",
)
