"""Mixtral (Jiang et al. 2024): Mistral with experts in each layer, whose weights are a softmax over the chosen ones."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.dense import dense_gguf, dense_spec, one_window
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata
from meshlm.architectures.layers import with_attention, with_experts
from meshlm.architectures.moe import GGUF_KEYS, gguf_moe, moe_spec
from meshlm.architectures.weights import ExpertNames, transformer_weights
from meshlm.protocol.model import ModelSpec

NAMES = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.{}", "w1", "w3", "w2")


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    spec = dense_spec(config, architecture)
    moe = replace(moe_spec(config, "num_local_experts", "intermediate_size"), norm_topk_prob=True)
    return with_experts(with_attention(spec, sliding_window=one_window(config, spec, slides=True)), moe)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return with_experts(dense_gguf(metadata, architecture), gguf_moe(metadata, norm_topk_prob=True))


FAMILY = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    spec=_spec,
    weights=lambda spec: transformer_weights(spec, experts=NAMES),
    keys=frozenset(("num_local_experts", "num_experts_per_tok", "router_jitter_noise")),
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
    },
    gguf=GGUFFamily("llama", _gguf, GGUF_KEYS, experts=True, interleaved_heads=True),
    compiles=False,
)
