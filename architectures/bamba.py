"""Bamba (IBM 2024): Mamba-2 layers, a few with attention between them, and an MLP in each."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import shown, words
from meshlm.architectures.dense import (
    attention_weights,
    decoder_weights,
    dense_spec,
    mlp_weights,
    norm_weights,
    one_window,
)
from meshlm.architectures.family import Family, Weight
from meshlm.architectures.states import KEYS, MODEL, PACKED, mamba2_state, mamba2_weights
from meshlm.protocol.model import ModelSpec

_NORMS = (("input_layernorm", "", "input_norm"), ("pre_ff_layernorm", "", "post_norm"))


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = dense_spec(config, architecture)
    one_window(config, spec, slides=False)
    attends = _attends(config, spec.num_hidden_layers)
    states = tuple(not one for one in attends)
    return replace(spec, attention_layers=attends, state=mamba2_state(config, states) if any(states) else None)


def _attends(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers attend. ValueError."""
    given = config.get("attn_layer_indices") or []
    if not isinstance(given, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in given):
        raise ValueError(f"attn_layer_indices must be numbers of layers below {layers}, got {shown(given)}")
    return tuple(layer in given for layer in range(layers))


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    def in_layer(layer: int) -> Iterator[Weight]:
        yield from attention_weights(spec) if spec.has_attention(layer) else mamba2_weights(spec)
        yield from mlp_weights(spec, spec.intermediate_size, ("feed_forward", "", "mlp"))
        yield from norm_weights(spec, _NORMS)

    return decoder_weights(spec, in_layer)


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
