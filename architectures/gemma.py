"""Gemma (Gemma Team 2024), the first: a Llama with scaled embeddings, whose norms' weights are stored as what they have more than 1."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.dense import dense_gguf, dense_spec
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata, Weight
from meshlm.architectures.weights import PRE_NORMS, transformer_weights
from meshlm.protocol.model import ModelSpec

_ACT = "gelu_pytorch_tanh"


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    act = config.get("hidden_activation") or config.get("hidden_act") or _ACT
    if act == "gelu":
        act = _ACT  # the first files say so and mean this, as transformers knows
    return dense_spec({**config, "hidden_act": act}, architecture)


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    return transformer_weights(spec, PRE_NORMS, norm_plus=1.0)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return replace(dense_gguf(metadata, architecture), hidden_act=_ACT)


FAMILY = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    spec=_spec,
    weights=_weights,
    keys=frozenset(("hidden_activation",)),
    defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    gguf=GGUFFamily("gemma", _gguf),
    float16=False,
    compiles=False,
    model="meshlm.workers.models.gemma:Gemma1",
)
