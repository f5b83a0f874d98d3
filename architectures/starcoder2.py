"""StarCoder2 (Lozhkov et al. 2024): layer norms, biases and an MLP without a gate; all layers may slide."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, shown, words
from meshlm.architectures.dense import dense_gguf, one_window
from meshlm.architectures.family import GGUFMetadata
from meshlm.architectures.layer_norms import GGUF_EPS, LAYER_NORMS, layer_norm_form, layer_norm_spec, renaming
from meshlm.architectures.layers import with_attention
from meshlm.protocol.model import LayerNormSpec, ModelSpec

_ORDER = LayerNormSpec()


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    for key, value in (("norm_type", "layer_norm"), ("mlp_type", "default")):
        if config.get(key) not in (None, value):
            raise ValueError(f"{key} {shown(config[key])} is not supported; supported: {value}")
    if config.get("activation_function") not in (None, config.get("hidden_act")):  # the older name
        both = f"{shown(config['activation_function'])} and hidden_act {shown(config.get('hidden_act'))}"
        raise ValueError(f"activation_function {both} differ")
    bias = boolean(config, "use_bias")
    given = {**config, "attention_bias": bias, "mlp_bias": bias}
    spec = layer_norm_spec(given, architecture, _ORDER, eps="norm_epsilon")
    return with_attention(spec, sliding_window=one_window(config, spec, slides=True))


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    return replace(
        dense_gguf(metadata, architecture, GGUF_EPS),
        hidden_act="gelu_pytorch_tanh",
        mlp_bias="blk.0.ffn_up.bias" in metadata.shapes,
        norm_bias=True,
        layer_norms=_ORDER,
    )


FAMILY = LAYER_NORMS._replace(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    spec=_spec,
    keys=words("use_bias norm_epsilon norm_type mlp_type activation_function"),
    defaults={
        "num_key_value_heads": 2,
        "use_bias": True,
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
    rename=renaming(r"model\.layers\.", {}, {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}),
    gguf=layer_norm_form("starcoder2", _gguf),
)
