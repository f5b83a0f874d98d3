"""Granite 4 (IBM 2025): Mamba-2 layers, a few with attention between them, and experts or an MLP in each; numbers multiply its sums, as
in granite.py."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, shown, words
from meshlm.architectures.dense import (
    PRE_NORMS,
    attention_weights,
    decoder_weights,
    dense_spec,
    mlp_weights,
    norm_weights,
)
from meshlm.architectures.family import Family, Weight
from meshlm.architectures.granite import (
    MULTIPLIERS,
    NAMES,
    PACKED_EXPERTS,
    multiplied,
    refuse_quantised,
    renamed_experts,
    with_multipliers,
)
from meshlm.architectures.moe import checked, expert_weights
from meshlm.architectures.states import KEYS, MODEL, PACKED, layers_of, mamba2_state, mamba2_weights
from meshlm.protocol.model import ModelSpec, MoESpec

_KINDS = {"mamba": "state", "linear_attention": "state", "attention": "attention", "full_attention": "attention"}


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    refuse_quantised(config, architecture)
    kinds = layers_of(config, _KINDS)
    positions = config.get("position_embedding_type")
    if positions not in (None, "nope", "rope"):
        raise ValueError(f"position_embedding_type {shown(positions)} is not supported; supported: rope, nope")
    shared, count = integer(config, "shared_intermediate_size"), integer(config, "num_local_experts")
    wide = integer(config, "intermediate_size")
    spec = dense_spec({**config, "intermediate_size": wide if count else shared, "mlp_bias": False}, architecture)
    layers, states = spec.num_hidden_layers, tuple(kind == "state" for kind in kinds)
    moe = None
    if count:
        moe = MoESpec(
            num_experts=count,
            num_experts_per_tok=integer(config, "num_experts_per_tok"),
            moe_intermediate_size=wide,
            norm_topk_prob=True,  # their softmax is over those that are chosen
            shared_intermediate_size=shared,
        )
        checked(moe, "num_local_experts")
    spec = replace(
        spec,
        moe=moe,
        attention_layers=tuple(not one for one in states),
        state=mamba2_state(config, states) if any(states) else None,
        no_rope_layers=() if positions == "rope" else (True,) * layers,
    )
    return with_multipliers(spec, config)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    def in_layer(layer: int) -> Iterator[Weight]:
        yield from attention_weights(spec) if spec.has_attention(layer) else mamba2_weights(spec)
        if spec.has_experts(layer):
            yield from expert_weights(spec, NAMES)
        else:
            yield from mlp_weights(spec, spec.intermediate_size, ("shared_mlp", "", "mlp"))
        yield from norm_weights(spec, PRE_NORMS)

    return multiplied(spec, decoder_weights(spec, in_layer))


FAMILY = Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    spec=_spec,
    weights=_weights,
    keys=KEYS
    | MULTIPLIERS
    | words(
        "num_local_experts num_experts_per_tok shared_intermediate_size layers_block_type "
        "position_embedding_type normalization_function"
    ),
    defaults={
        **dict.fromkeys(MULTIPLIERS, 1.0),
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    },
    packed={
        **PACKED,
        "shared_mlp.input_linear": ("shared_mlp.gate_proj", "shared_mlp.up_proj"),
        "shared_mlp.output_linear": ("shared_mlp.down_proj",),
        **PACKED_EXPERTS,
    },
    rename=renamed_experts,
    compiles=False,
    model=MODEL,
)
