"""Llama (Touvron et al. 2023; Grattafiori et al. 2024)."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.dense import dense_gguf, dense_spec, dense_weights, one_window
from meshlm.architectures.family import Family, GGUFFamily
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = dense_spec(config, architecture)
    return replace(spec, sliding_window=one_window(config, spec, slides=False))


FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    spec=_spec,
    weights=dense_weights,
    gguf=GGUFFamily("llama", dense_gguf, interleaved_heads=True),
)
