"""Command R (Cohere 2024): attention and MLP beside one another behind one layer norm, logits multiplied by a number."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import number, words
from meshlm.architectures.dense import dense_gguf, dense_spec, one_window, refuse_quantised
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.weights import Norms, rotating_neighbours, transformer_weights
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_NORMS: Norms = (("input_layernorm", "attn_norm", "attention_norm"),)
KEYS = words("logit_scale layer_norm_eps")
DEFAULTS: dict[str, Any] = {
    "logit_scale": 0.0625,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
_EPS = "attention.layer_norm_epsilon"
GGUF_KEYS = frozenset((_EPS, "logit_scale"))
MODEL = "meshlm.workers.models.layer_norm:LayerNormDecoder"
ORDER = LayerNormSpec(parallel=1, gated=True)


def cohere_spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    """The ModelSpec that Command R and Command R7B have in common. KeyError, ValueError."""
    refuse_quantised(config, architecture)
    return replace(
        dense_spec({**config, "mlp_bias": False}, architecture),
        rms_norm_eps=number(config["layer_norm_eps"], "layer_norm_eps"),
        logit_scale=number(config["logit_scale"], "logit_scale"),
        layer_norms=ORDER,
    )


def cohere_gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    """The form of .gguf files that both have in common. MetadataError."""
    spec = dense_gguf(metadata, architecture, _EPS)
    return replace(spec, logit_scale=float(metadata.get("logit_scale")), layer_norms=ORDER)


def cohere_weights(spec: ModelSpec) -> Iterator[Weight]:
    """Every tensor."""
    return rotating_neighbours(spec, transformer_weights(spec, _NORMS))


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = cohere_spec(config, architecture)
    one_window(config, spec, slides=False)
    return spec


FAMILY = Family(
    architecture="CohereForCausalLM",
    model_type="cohere",
    spec=_spec,
    weights=cohere_weights,
    keys=KEYS,
    defaults={**DEFAULTS, "rope_theta": 500_000.0},
    gguf=GGUFFamily("command-r", cohere_gguf, GGUF_KEYS, interleaved_heads=True),
    compiles=False,
    model=MODEL,
)
