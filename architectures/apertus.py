"""Apertus (Swiss AI 2025): a Llama with norms of its query and key heads, and an MLP without a gate whose function is learned (xIELU).

Numbers of that function are tensors of a checkpoint; a .gguf file has them in its metadata.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import shown
from meshlm.architectures.dense import dense_gguf, dense_spec
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, MetadataError, Weight
from meshlm.architectures.layer_norms import ungated_weights
from meshlm.architectures.weights import Norms, attention_weights, decoder_weights, norm_weights
from meshlm.protocol.layers import MLP, Layers, LayerSpec
from meshlm.protocol.model import ModelSpec

NUMBERS = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""The parameters of xIELU (Huang and Schlag 2024), and the shapes of their tensors."""
_NORMS: Norms = (("attention_layernorm", "attn_norm", "input_norm"), ("feedforward_layernorm", "ffn_norm", "post_norm"))
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    if config.get("hidden_act", "xielu") != "xielu":
        raise ValueError(
            f"hidden_act {shown(config['hidden_act'])} is not supported for {architecture}; supported: xielu"
        )
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_parameters": _ROPE}
    spec = dense_spec({**config, "hidden_act": "silu", "mlp_bias": False}, architecture)
    return replace(spec, hidden_act="xielu", qk_norm=True)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    spec, get = dense_gguf(metadata, architecture), metadata.fields.get
    columns = [get(f"xielu.{name}") for name in NUMBERS]
    for name, column in zip(NUMBERS, columns, strict=True):
        if not isinstance(column, list) or len(column) != spec.num_hidden_layers:
            raise MetadataError(f"metadata xielu.{name} is {shown(column)}; it must be a number for each layer")
    numbers = tuple(tuple(map(float, row)) for row in zip(*columns, strict=True))
    records = (
        replace(layer, mlp=MLP(intermediate_size=layer.intermediate_size, xielu=row))
        for layer, row in zip(spec.layers, numbers, strict=True)
    )
    return replace(spec, hidden_act="xielu", qk_norm=True, layers=Layers.from_records(records))


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    def in_layer(layer: LayerSpec) -> Iterator[Weight]:
        yield from attention_weights(spec, layer)
        yield from ungated_weights(spec, layer)
        yield from norm_weights(spec, layer, _NORMS)
        for name, shape in NUMBERS.items() if layer.mlp is not None and not layer.mlp.xielu else ():
            yield Weight(f"mlp.act_fn.{name}", f"xielu.{name}", f"mlp.{name}", shape, quantises=False)

    return decoder_weights(spec, in_layer)


FAMILY = Family(
    architecture="ApertusForCausalLM",
    model_type="apertus",
    spec=_spec,
    weights=_weights,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 12e6, "max_position_embeddings": 65536},
    gguf=GGUFFamily("apertus", _gguf, frozenset(f"xielu.{name}" for name in NUMBERS)),
    compiles=False,
    model="meshlm.workers.models.apertus:Apertus",
)
