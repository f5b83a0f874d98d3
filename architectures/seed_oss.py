"""Seed-OSS (ByteDance Seed 2025): a Llama whose output projection may have a bias of its own."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean
from meshlm.architectures.dense import dense_gguf, full_spec
from meshlm.architectures.family import Family, GGUFFamily
from meshlm.architectures.weights import POST_ATTENTION_NORMS, transformer_weights
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    return replace(full_spec(config, architecture), output_bias=boolean(config, "attention_out_bias"))


FAMILY = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    spec=_spec,
    weights=lambda spec: transformer_weights(spec, POST_ATTENTION_NORMS),
    keys=frozenset(("attention_out_bias",)),
    defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "max_position_embeddings": 524288},
    gguf=GGUFFamily("seed_oss", dense_gguf),
)
