"""Granite 4 (IBM 2025): Mamba-2 layers, a few with attention between them, and experts or an MLP in each; numbers multiply its sums.

They are multiplied into the weights while these load: the residual's into what is added to it, the embedding's and the logits' into the
embedding and the last norm.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import integer, number, shown, words
from meshlm.architectures.dense import (
    PRE_NORMS,
    attention_weights,
    decoder_weights,
    dense_spec,
    mlp_weights,
    norm_weights,
)
from meshlm.architectures.family import Family, Weight
from meshlm.architectures.moe import ExpertNames, checked, expert_weights
from meshlm.architectures.states import KEYS, MODEL, PACKED, layers_of, mamba2_state, mamba2_weights
from meshlm.protocol.model import ModelSpec, MoESpec

_MULTIPLIERS = words("embedding_multiplier logits_scaling residual_multiplier attention_multiplier")
_NAMES = ExpertNames(router="block_sparse_moe.router", expert="block_sparse_moe.experts.{}", shared="shared_mlp")
_KINDS = {"mamba": "state", "linear_attention": "state", "attention": "attention", "full_attention": "attention"}


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    for key in ("quantization_config", "compression_config", "quantization"):
        if config.get(key):
            raise ValueError(f"{key} is not supported for {architecture}, whose weights are multiplied while they load")
    kinds = layers_of(config, _KINDS)
    positions = config.get("position_embedding_type")
    if positions not in (None, "nope", "rope"):
        raise ValueError(f"position_embedding_type {shown(positions)} is not supported; supported: rope, nope")
    shared, count = integer(config, "shared_intermediate_size"), integer(config, "num_local_experts")
    wide = integer(config, "intermediate_size")
    scales = {key: number(config[key], key) for key in _MULTIPLIERS}
    if not all(scales.values()):
        raise ValueError(
            "embedding_multiplier, logits_scaling, residual_multiplier and attention_multiplier must be positive"
        )
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
    return replace(
        spec,
        moe=moe,
        attention_layers=tuple(not one for one in states),
        state=mamba2_state(config, states) if any(states) else None,
        no_rope_layers=() if positions == "rope" else (True,) * layers,
        query_pre_attn_scalar=scales["attention_multiplier"] ** -2,
        multipliers=(scales["embedding_multiplier"], scales["logits_scaling"], scales["residual_multiplier"]),
    )


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    embedding, logits, residual = spec.multipliers

    def in_layer(layer: int) -> Iterator[Weight]:
        yield from attention_weights(spec) if spec.has_attention(layer) else mamba2_weights(spec)
        if spec.has_experts(layer):
            yield from expert_weights(spec, _NAMES)
        else:
            yield from mlp_weights(spec, spec.intermediate_size, ("shared_mlp", "", "mlp"))
        yield from norm_weights(spec, PRE_NORMS)

    head = 1 / logits / (embedding if spec.tie_word_embeddings else 1.0)
    for weight in decoder_weights(spec, in_layer):
        last = weight.parameter.rpartition(".")[0].rpartition(".")[2]
        times = {"embed": embedding, "norm": head if weight.layer is None else 1.0, "o": residual, "down": residual}
        yield weight._replace(times=times.get(last, 1.0))


def _renamed(name: str) -> str:
    name = name.replace("block_sparse_moe.router.layer.", "block_sparse_moe.router.")
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return f"{name}.weight"
    return name.replace("block_sparse_moe.input_linear.", "block_sparse_moe.experts.gate_up_proj.").replace(
        "block_sparse_moe.output_linear.", "block_sparse_moe.experts.down_proj."
    )


_EXPERTS = "block_sparse_moe.experts"
FAMILY = Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    spec=_spec,
    weights=_weights,
    keys=KEYS
    | _MULTIPLIERS
    | words(
        "num_local_experts num_experts_per_tok shared_intermediate_size layers_block_type "
        "position_embedding_type normalization_function"
    ),
    defaults={
        **dict.fromkeys(_MULTIPLIERS, 1.0),
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
        f"{_EXPERTS}.gate_up_proj": (f"{_EXPERTS}.{{}}.gate_proj", f"{_EXPERTS}.{{}}.up_proj"),
        f"{_EXPERTS}.down_proj": (f"{_EXPERTS}.{{}}.down_proj",),
    },
    rename=_renamed,
    compiles=False,
    model=MODEL,
)
