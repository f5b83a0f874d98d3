"""Granite 3 (IBM 2024), dense and with experts: a Llama whose embedding, scores, sums and logits are multiplied by four numbers.

Three of them are multiplied into the weights while these load: the residual's into what is added to it, the embedding's and the
logits' into the embedding and the last norm. The attention's is the scale of scores.

Granite MoE with an MLP beside the experts that every token goes to (GraniteMoeShared) is the same otherwise.

Granite 4 (IBM 2025): Mamba-2 layers, a few with attention between them, and experts or an MLP in each; numbers multiply its sums, as
in granite.py.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures import layers, states
from meshlm.architectures.config_values import integer, number, refuse_quantised, shown, words
from meshlm.architectures.dense import dense_gguf, dense_spec, layers_that_attend, partly_rotated
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, Weight
from meshlm.architectures.weights import ExpertNames, transformer_weights
from meshlm.protocol.layers import MoESpec
from meshlm.protocol.model import ModelSpec

MULTIPLIED = "weights are multiplied while they load"
MULTIPLIERS = words("embedding_multiplier logits_scaling residual_multiplier attention_multiplier")
NAMES = ExpertNames(router="block_sparse_moe.router", expert="block_sparse_moe.experts.{}", shared="shared_mlp")
_EXPERTS = "block_sparse_moe.experts"
PACKED_EXPERTS = {
    f"{_EXPERTS}.gate_up_proj": (f"{_EXPERTS}.{{}}.gate_proj", f"{_EXPERTS}.{{}}.up_proj"),
    f"{_EXPERTS}.down_proj": (f"{_EXPERTS}.{{}}.down_proj",),
}
GGUF_SCALES = words("embedding_scale logit_scale residual_scale attention.scale")


def with_multipliers(spec: ModelSpec, values: dict[str, Any]) -> ModelSpec:
    """The spec with the four numbers. ValueError."""
    scales = {key: number(values[key], key) for key in MULTIPLIERS}
    if not all(scales.values()):
        raise ValueError(
            "embedding_multiplier, logits_scaling, residual_multiplier and attention_multiplier must be positive"
        )
    return replace(
        spec,
        query_pre_attn_scalar=scales["attention_multiplier"] ** -2,
        multipliers=(scales["embedding_multiplier"], scales["logits_scaling"], scales["residual_multiplier"]),
    )


def multiplied(spec: ModelSpec, weights: Iterator[Weight]) -> Iterator[Weight]:
    """The weights, and what each of them is multiplied by while it loads."""
    embedding, logits, residual = spec.multipliers
    head = 1 / logits / (embedding if spec.tie_word_embeddings else 1.0)
    for weight in weights:
        last = weight.parameter.rpartition(".")[0].rpartition(".")[2]
        times = {"embed": embedding, "norm": head if weight.layer is None else 1.0, "o": residual, "down": residual}
        yield weight._replace(times=times.get(last, 1.0))


def renamed_experts(name: str) -> str:
    """The name of a file's tensor with the matrices of all experts, or of a router, as the families here have it."""
    name = name.replace("block_sparse_moe.router.layer.", "block_sparse_moe.router.")
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return f"{name}.weight"
    return name.replace("block_sparse_moe.input_linear.", "block_sparse_moe.experts.gate_up_proj.").replace(
        "block_sparse_moe.output_linear.", "block_sparse_moe.experts.down_proj."
    )


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    refuse_quantised(config, architecture, MULTIPLIED)
    return with_multipliers(dense_spec(config, architecture), config)


def _moe_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    moe = replace(layers.moe_spec(config, "num_local_experts", "intermediate_size"), norm_topk_prob=True)
    moe = replace(moe, shared_intermediate_size=integer(config, "shared_intermediate_size", 0))
    return layers.with_experts(_spec(config, architecture), layers.checked(moe, "num_local_experts"))


def granite_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """Files say by rope.scaling.finetuned whether heads have positions. MetadataError."""
    spec, get = dense_gguf(metadata, architecture), metadata.get
    if get("rope.scaling.finetuned", True) is False:
        spec = layers.with_attention(spec, rotates=False)
    names = ("embedding_scale", "logit_scale", "residual_scale", "attention.scale")
    unscaled = (1.0, 1.0, 1.0, spec.head_dim**-0.5)
    keys = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
    values = {key: float(get(name, plain)) for key, name, plain in zip(keys, names, unscaled, strict=True)}
    try:
        return with_multipliers(spec, values)
    except ValueError as error:
        raise MetadataError(f"metadata {metadata.kind}: {error}") from None


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """Files of a Granite 4 without states are of this kind too, and name sizes of states and experts that they do not have."""
    metadata, attends = layers_that_attend(metadata)
    if not all(attends):
        raise MetadataError(f"metadata {metadata.kind}.attention.head_count_kv is 0 of a layer")
    spec = granite_gguf(metadata, architecture)
    return layers.with_mlps(
        spec, intermediate_size=metadata.shapes.get("blk.0.ffn_up.weight", (spec.intermediate_size,))[0]
    )


def _moe_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return layers.with_experts(granite_gguf(metadata, architecture), layers.gguf_moe(metadata, norm_topk_prob=True))


GRANITE = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    spec=_spec,
    weights=lambda spec: multiplied(spec, transformer_weights(spec)),
    keys=MULTIPLIERS,
    defaults={**dict.fromkeys(MULTIPLIERS, 1.0), "max_position_embeddings": 2048},
    gguf=GGUFFamily(
        "granite",
        _gguf,
        GGUF_SCALES | states.GGUF_STATE | {"expert_used_count", "expert_shared_feed_forward_length"},
        interleaved_heads=True,
    ),
)
GRANITE_MOE = Family(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    spec=_moe_spec,
    weights=lambda spec: multiplied(spec, transformer_weights(spec, experts=NAMES)),
    keys=MULTIPLIERS | words("num_local_experts num_experts_per_tok"),
    defaults=dict.fromkeys(MULTIPLIERS, 1.0)
    | {"max_position_embeddings": 2048, "num_local_experts": 8, "num_experts_per_tok": 2},
    packed=PACKED_EXPERTS,
    gguf=GGUFFamily("granitemoe", _moe_gguf, GGUF_SCALES | layers.GGUF_KEYS, experts=True, interleaved_heads=True),
    rename=renamed_experts,
    compiles=False,
)
_PACKED_SHARED = {
    "shared_mlp.input_linear": ("shared_mlp.gate_proj", "shared_mlp.up_proj"),
    "shared_mlp.output_linear": ("shared_mlp.down_proj",),
    **PACKED_EXPERTS,
}
GRANITE_MOE_SHARED = GRANITE_MOE._replace(
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    keys=GRANITE_MOE.keys | words("shared_intermediate_size"),
    packed=_PACKED_SHARED,
    gguf=None,
)
_KINDS = {"mamba": "state", "linear_attention": "state", "attention": "attention", "full_attention": "attention"}


def _hybrid_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    refuse_quantised(config, architecture, MULTIPLIED)
    kinds = states.layers_of(config, _KINDS)
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
        spec = layers.with_experts(spec, layers.checked(moe, "num_local_experts"))
    if "state" in kinds:
        spec = layers.with_states(spec, states.mamba2_state(config), [kind == "state" for kind in kinds])
    return with_multipliers(layers.with_attention(spec, rotates=positions == "rope"), config)


def _hybrid_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """Files of Bamba are of this kind too: with positions, and without multipliers."""
    metadata, attends = layers_that_attend(metadata)
    spec = granite_gguf(metadata, architecture)
    if metadata.get("expert_count", 0):
        shared = int(metadata.get("expert_shared_feed_forward_length", 0))
        spec = layers.with_experts(
            spec, layers.gguf_moe(metadata, norm_topk_prob=True, shared_intermediate_size=shared)
        )
    else:  # feed_forward_length is that of experts, also where there are none
        wide = metadata.shapes.get("blk.0.ffn_up.weight", (spec.intermediate_size,))[0]
        spec = layers.with_mlps(spec, intermediate_size=wide)
    spec = partly_rotated(spec, metadata)
    return (
        spec if all(attends) else layers.with_states(spec, states.mamba2_gguf(metadata), [not one for one in attends])
    )


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    mlp = ("shared_mlp", "ffn_{}", "mlp")
    return multiplied(spec, transformer_weights(spec, state=states.mamba2_weights, mlp=mlp, experts=NAMES))


GRANITE_HYBRID = Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    spec=_hybrid_spec,
    weights=_weights,
    keys=states.KEYS
    | MULTIPLIERS
    | words(
        "num_local_experts num_experts_per_tok shared_intermediate_size layers_block_type "
        "position_embedding_type normalization_function"
    ),
    defaults=dict.fromkeys(MULTIPLIERS, 1.0)
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024}
    | {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_expand": 2},
    packed={**states.PACKED, **_PACKED_SHARED},
    rename=renamed_experts,
    gguf=GGUFFamily(
        "granitehybrid",
        _hybrid_gguf,
        GGUF_SCALES | layers.GGUF_KEYS | states.GGUF_STATE | {"expert_shared_feed_forward_length"},
        packed=states.GGUF_PACKED,
        interleaved_heads=True,
    ),
    model=states.MODEL,
)
FAMILIES = (GRANITE, GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE_HYBRID)
