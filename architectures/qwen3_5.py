"""Qwen3.5 (Qwen 2026): Qwen3-Next's gated delta nets and attention with a gate, in front of MLPs or of experts.

The rows of a mixer's products stand by kind (all queries, all keys, ...), and not by heads of keys as Qwen3-Next's.
"""

from collections.abc import Iterator
from typing import Any

from meshlm.architectures import qwen3_next
from meshlm.architectures.config_values import boolean, words
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.layers import with_experts
from meshlm.architectures.moe import GGUF_KEYS, layers_with_experts
from meshlm.architectures.qwen3_next import gated_delta_moe, gated_delta_spec, gated_delta_weights
from meshlm.protocol.layers import StateSpec
from meshlm.protocol.model import ModelSpec

_KEYS = qwen3_next.STATE_KEYS | words(
    "attn_output_gate mtp_num_hidden_layers mtp_use_dedicated_embeddings mlp_only_layers"
)


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    if not boolean(config, "attn_output_gate"):
        raise ValueError("attn_output_gate false is not supported")
    return gated_delta_spec(config, architecture)


def _moe_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    config = {**config, "intermediate_size": config["moe_intermediate_size"]}  # no layer has a plain MLP
    return with_experts(_spec(config, architecture), gated_delta_moe(config), layers_with_experts(config))


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """States are in float32, as config.json says of this family; positions of text are the same on each axis of its rotation."""
    spec = qwen3_next.gated_delta_gguf(metadata, architecture)
    return spec.with_state_dtype("float32")


def _moe_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return with_experts(_gguf(metadata, architecture), qwen3_next.gated_delta_gguf_moe(metadata))


def _projections(state: StateSpec) -> tuple[tuple[str, int], ...]:
    keys = state.n_groups * state.state_size
    return (
        ("q", keys),
        ("k", keys),
        ("v", state.inner),
        ("z", state.inner),
        ("b", state.num_heads),
        ("a", state.num_heads),
    )


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    return gated_delta_weights(spec, _projections)


_DEFAULTS = qwen3_next.DEFAULTS | {"num_key_value_heads": 4, "attn_output_gate": True}
_MODEL = "meshlm.workers.models.qwen3_5:Qwen3_5"
_PACKED = qwen3_next.PACKED | {"linear_attn.in_proj_qkv": tuple(f"linear_attn.in_proj_{part}" for part in "qkv")}
_GGUF_KEYS = qwen3_next.GGUF_DELTA | {"rope.dimension_sections"}
_DENSE = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    spec=_spec,
    weights=_weights,
    keys=_KEYS,
    defaults=_DEFAULTS,
    packed=_PACKED,
    rename=str,
    unread=qwen3_next.DRAFTS,
    gguf=GGUFFamily("qwen35", _gguf, _GGUF_KEYS, packed=qwen3_next.GGUF_PACKED),
    compiles=False,
    model=_MODEL,
)
_EXPERTS = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_MOE = _DENSE._replace(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    spec=_moe_spec,
    gguf=GGUFFamily(
        "qwen35moe",
        _moe_gguf,
        _GGUF_KEYS | GGUF_KEYS | {"expert_shared_feed_forward_length"},
        experts=True,
        packed=qwen3_next.GGUF_PACKED,
    ),
    keys=_KEYS | qwen3_next.EXPERT_KEYS,
    defaults=_DEFAULTS | _EXPERTS | {"num_key_value_heads": 2},
    packed=_PACKED
    | {
        "mlp.experts.gate_up_proj": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
        "mlp.experts.down_proj": ("mlp.experts.{}.down_proj",),
    },
)
FAMILIES = (_DENSE, _MOE)
