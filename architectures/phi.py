"""Phi-1, 1.5 and 2 (Gunasekar et al. 2023): attention and MLP beside one another behind one norm; everything has a bias."""

from typing import Any

from meshlm.architectures.config_values import words
from meshlm.architectures.family import GGUFMetadata
from meshlm.architectures.layer_norms import LAYER_NORMS, layer_norm_form, layer_norm_gguf, layer_norm_spec, renaming
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_ORDER = LayerNormSpec(parallel=1, head_bias=True)


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    biased = {**config, "attention_bias": True, "mlp_bias": True}
    return layer_norm_spec(biased, architecture, _ORDER, eps="layer_norm_eps")


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return layer_norm_gguf(metadata, architecture, _ORDER)


FAMILY = LAYER_NORMS._replace(
    architecture="PhiForCausalLM",
    model_type="phi",
    spec=_spec,
    keys=words("layer_norm_eps"),
    defaults={
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 2048,
    },
    rename=renaming(
        r"model\.layers\.",
        {"model.final_layernorm": "model.norm"},
        {"self_attn.dense": "self_attn.o_proj", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"},
    ),
    gguf=layer_norm_form("phi2", _gguf),
)
