"""Granite 4 (IBM 2025): Mamba-2 layers, a few with attention between them, and experts or an MLP in each; numbers multiply its sums, as
in granite.py."""

from collections.abc import Iterator
from typing import Any

from meshlm.architectures.config_values import integer, shown, words
from meshlm.architectures.dense import dense_spec, layers_that_attend, partly_rotated
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.granite import (
    GGUF_SCALES,
    MULTIPLIERS,
    NAMES,
    PACKED_EXPERTS,
    granite_gguf,
    multiplied,
    refuse_quantised,
    renamed_experts,
    with_multipliers,
)
from meshlm.architectures.layers import with_attention, with_experts, with_mlps, with_states
from meshlm.architectures.moe import GGUF_KEYS, checked, gguf_moe
from meshlm.architectures.states import (
    GGUF_PACKED,
    GGUF_STATE,
    KEYS,
    MODEL,
    PACKED,
    layers_of,
    mamba2_gguf,
    mamba2_state,
    mamba2_weights,
)
from meshlm.architectures.weights import (
    transformer_weights,
)
from meshlm.protocol.layers import MoESpec
from meshlm.protocol.model import ModelSpec

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
    if count:
        moe = MoESpec(
            num_experts=count,
            num_experts_per_tok=integer(config, "num_experts_per_tok"),
            moe_intermediate_size=wide,
            norm_topk_prob=True,  # their softmax is over those that are chosen
            shared_intermediate_size=shared,
        )
        spec = with_experts(spec, checked(moe, "num_local_experts"))
    if "state" in kinds:
        spec = with_states(spec, mamba2_state(config), [kind == "state" for kind in kinds])
    return with_multipliers(with_attention(spec, rotates=positions == "rope"), config)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """Files of Bamba are of this kind too: with positions, and without multipliers."""
    metadata, attends = layers_that_attend(metadata)
    spec = granite_gguf(metadata, architecture)
    if metadata.get("expert_count", 0):
        shared = int(metadata.get("expert_shared_feed_forward_length", 0))
        spec = with_experts(spec, gguf_moe(metadata, norm_topk_prob=True, shared_intermediate_size=shared))
    else:  # feed_forward_length is that of experts, also where there are none
        wide = metadata.shapes.get("blk.0.ffn_up.weight", (spec.intermediate_size,))[0]
        spec = with_mlps(spec, intermediate_size=wide)
    spec = partly_rotated(spec, metadata)
    return spec if all(attends) else with_states(spec, mamba2_gguf(metadata), [not one for one in attends])


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    mlp = ("shared_mlp", "ffn_{}", "mlp")
    return multiplied(spec, transformer_weights(spec, state=mamba2_weights, mlp=mlp, experts=NAMES))


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
    gguf=GGUFFamily(
        "granitehybrid",
        _gguf,
        GGUF_SCALES | GGUF_KEYS | GGUF_STATE | {"expert_shared_feed_forward_length"},
        packed=GGUF_PACKED,
        interleaved_heads=True,
    ),
    compiles=False,
    model=MODEL,
)
