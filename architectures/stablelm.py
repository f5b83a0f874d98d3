"""StableLM (Bellagente et al. 2024): layer norms around Llama's attention and MLP, a part of each head is turned."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, words
from meshlm.architectures.family import GGUFMetadata
from meshlm.architectures.layer_norms import LAYER_NORMS, layer_norm_form, layer_norm_gguf, layer_norm_spec
from meshlm.protocol.model import LayerNormSpec, ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    order = LayerNormSpec(gated=True, parallel=1 if boolean(config, "use_parallel_residual") else 0)
    biased = {**config, "attention_bias": boolean(config, "use_qkv_bias"), "mlp_bias": False}
    return replace(layer_norm_spec(biased, architecture, order, eps="layer_norm_eps"), output_bias=False)


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    order = LayerNormSpec(gated=True, parallel=0 if "blk.0.ffn_norm.weight" in metadata.shapes else 1)
    return layer_norm_gguf(metadata, architecture, order, "silu")


FAMILY = LAYER_NORMS._replace(
    architecture="StableLmForCausalLM",
    model_type="stablelm",
    spec=_spec,
    keys=words("layer_norm_eps use_qkv_bias use_parallel_residual"),
    defaults={
        "layer_norm_eps": 1e-5,
        "hidden_act": "silu",
        "partial_rotary_factor": 0.25,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    },
    gguf=layer_norm_form("stablelm", _gguf, "use_parallel_residual"),
)
