"""ERNIE 4.5 (Baidu 2025), dense and with experts: a Llama that turns neighbours, whose biases are all there or all missing.
Experts are scored by a softmax and chosen with a correction, and their weights are divided by their sum.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer, number, refuse_quantised, shown, words
from meshlm.architectures.dense import dense_gguf, full_spec
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, Weight
from meshlm.architectures.layers import GGUF_KEYS, checked, gguf_moe, with_experts
from meshlm.architectures.weights import ExpertNames, rotating_neighbours, transformer_weights
from meshlm.protocol.layers import MoESpec
from meshlm.protocol.model import ModelSpec

_NAMES = ExpertNames(shared="mlp.shared_experts")
_DEFAULTS: dict[str, Any] = {"max_position_embeddings": 131072, "rope_theta": 500_000.0} | {
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    refuse_quantised(config, architecture, "heads rotate neighbours")
    bias = boolean(config, "use_bias")
    return full_spec({**config, "attention_bias": bias, "mlp_bias": bias}, architecture)


def _moe_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = _spec(config, architecture)
    if spec.mlp_bias:
        raise ValueError(f"use_bias true is not supported for {architecture}")
    if number(config["moe_norm_min"], "moe_norm_min") > 1e-6:
        raise ValueError(f"moe_norm_min {shown(config['moe_norm_min'])} is not supported; it may be 1e-6 at most")
    first, last, every = (integer(config, f"moe_layer_{name}") for name in ("start_index", "end_index", "interval"))
    if every < 1:
        raise ValueError(f"moe_layer_interval is {every}; it must be positive")
    last = spec.num_hidden_layers - 1 if last == -1 else last
    layers = tuple((layer + 1) % every == 0 and first <= layer <= last for layer in range(spec.num_hidden_layers))
    wide = integer(config, "moe_intermediate_size")
    moe = MoESpec(
        num_experts=integer(config, "moe_num_experts"),
        num_experts_per_tok=integer(config, "moe_k"),
        moe_intermediate_size=wide,
        norm_topk_prob=True,
        correction_bias=True,
        shared_intermediate_size=integer(config, "moe_num_shared_experts") * wide,
    )
    return with_experts(spec, checked(moe, "moe_num_experts"), layers) if any(layers) else spec


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec = dense_gguf(metadata, architecture)
    return replace(spec, mlp_bias="blk.0.ffn_up.bias" in metadata.shapes)


def _moe_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """The shared experts are as wide as their tensors: files give another number for it."""
    spec, get = dense_gguf(metadata, architecture), metadata.get
    first, every = int(get("leading_dense_block_count", 0)), int(get("interleave_moe_layer_step", 1))
    if every < 1:
        raise MetadataError(f"metadata {metadata.kind}.interleave_moe_layer_step is {every}; it must be positive")
    layers = tuple(layer >= first and (layer + 1) % every == 0 for layer in range(spec.num_hidden_layers))
    if not any(layers):
        raise MetadataError(f"metadata {metadata.kind}: no layer has experts")
    shared = metadata.shapes.get(f"blk.{layers.index(True)}.ffn_up_shexp.weight", (0,))
    moe = gguf_moe(metadata, norm_topk_prob=True, correction_bias=True, shared_intermediate_size=shared[0])
    return with_experts(spec, moe, layers)


def _moe_weights(spec: ModelSpec) -> Iterator[Weight]:
    for weight in rotating_neighbours(spec, transformer_weights(spec, experts=_NAMES)):
        if weight.parameter.endswith("correction_bias"):  # a file has it as a matrix of one row
            yield weight._replace(shape=(1, *weight.shape))
        else:
            yield weight


def _renamed(name: str) -> str:
    return name.replace(".mlp.moe_statics.", ".mlp.gate.").replace(".mlp.gate.moe_statics.", ".mlp.gate.")


ERNIE4_5 = Family(
    architecture="Ernie4_5ForCausalLM", model_type="ernie4_5", spec=_spec,
    weights=lambda spec: rotating_neighbours(spec, transformer_weights(spec)), keys=words("use_bias"),
    defaults={**_DEFAULTS, "num_key_value_heads": 2, "head_dim": 128}, gguf=GGUFFamily("ernie4_5", _gguf),
)  # fmt: skip
ERNIE4_5_MOE = Family(
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    spec=_moe_spec,
    weights=_moe_weights,
    keys=words("""
        use_bias moe_k moe_num_experts moe_num_shared_experts moe_layer_start_index moe_layer_end_index
        moe_layer_interval moe_norm_min moe_intermediate_size num_experts_per_tok num_experts num_local_experts
    """),
    defaults=_DEFAULTS
    | {"num_key_value_heads": 4}
    | {"moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}
    | {"moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_norm_min": 1e-12, "moe_intermediate_size": 1536},
    gguf=GGUFFamily(
        "ernie4_5-moe",
        _moe_gguf,
        GGUF_KEYS
        | words("""
            leading_dense_block_count interleave_moe_layer_step expert_shared_count expert_shared_feed_forward_length
        """),
        experts=True,
    ),
    rename=_renamed,
    compiles=False,
)
FAMILIES = (ERNIE4_5, ERNIE4_5_MOE)
