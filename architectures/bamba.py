"""Bamba (IBM 2024): Mamba-2 layers, a few with attention between them, and an MLP in each."""

from collections.abc import Iterator
from typing import Any

from meshlm.architectures.config_values import shown, words
from meshlm.architectures.dense import full_spec
from meshlm.architectures.family import Family, Weight
from meshlm.architectures.layers import with_states
from meshlm.architectures.states import KEYS, MODEL, PACKED, mamba2_state, mamba2_weights
from meshlm.architectures.weights import transformer_weights
from meshlm.protocol.model import ModelSpec

_NORMS = (("input_layernorm", "", "input_norm"), ("pre_ff_layernorm", "", "post_norm"))


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = full_spec(config, architecture)
    layers, given = spec.num_hidden_layers, config.get("attn_layer_indices") or []
    if not isinstance(given, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in given):
        raise ValueError(f"attn_layer_indices must be numbers of layers below {layers}, got {shown(given)}")
    states = [layer not in given for layer in range(layers)]
    return with_states(spec, mamba2_state(config), states) if any(states) else spec


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    return transformer_weights(spec, _NORMS, state=mamba2_weights, mlp=("feed_forward", "", "mlp"))


def _renamed(name: str) -> str:
    return name.replace("model.final_layernorm.", "model.norm.")


FAMILY = Family(
    architecture="BambaForCausalLM",
    model_type="bamba",
    spec=_spec,
    weights=_weights,
    keys=KEYS | words("attn_layer_indices attn_rotary_emb num_logits_to_keep z_loss_coefficient"),
    defaults={
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "max_position_embeddings": 262144,
        "num_key_value_heads": 8,
    },
    packed=PACKED,
    rename=_renamed,
    compiles=False,
    model=MODEL,
)
