"""StarCoder2 (Lozhkov et al. 2024): layer norms, biases and an MLP without a gate; all layers may slide."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, number, shown, words
from meshlm.architectures.dense import activation, attention_weights, decoder_weights, dense_spec, one_window
from meshlm.architectures.family import Family, Split, Weight
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    for key, value in (("norm_type", "layer_norm"), ("mlp_type", "default")):
        if config.get(key) not in (None, value):
            raise ValueError(f"{key} {shown(config[key])} is not supported; supported: {value}")
    bias = boolean(config, "use_bias")
    act = activation(config, "hidden_act", "gelu_pytorch_tanh")
    spec = dense_spec({**config, "hidden_act": act, "attention_bias": bias, "mlp_bias": bias}, architecture)
    return replace(
        spec,
        rms_norm_eps=number(config["norm_epsilon"], "norm_epsilon"),
        norm_bias=True,
        sliding_window=one_window(config, spec, slides=True),
    )


def _weights(spec: ModelSpec) -> Iterator[Weight]:
    hidden, wide, split = spec.hidden_size, spec.intermediate_size, Split.INTERMEDIATE

    def in_layer(layer: int) -> Iterator[Weight]:
        yield from attention_weights(spec)
        yield Weight("mlp.c_fc.weight", "ffn_up.weight", "mlp.up.weight", (wide, hidden), split)
        yield Weight("mlp.c_proj.weight", "ffn_down.weight", "mlp.down.weight", (hidden, wide), split, dim=1)
        if spec.mlp_bias:
            yield Weight("mlp.c_fc.bias", "ffn_up.bias", "mlp.up.bias", (wide,), split)
            yield Weight("mlp.c_proj.bias", "ffn_down.bias", "mlp.down.bias", (hidden,), Split.FIRST_RANK)
        yield from _norm("input_layernorm", "attn_norm", "attention_norm")
        yield from _norm("post_attention_layernorm", "ffn_norm", "mlp_norm")

    def _norm(name: str, gguf: str, parameter: str) -> Iterator[Weight]:
        for part in ("weight", "bias") if spec.norm_bias else ("weight",):
            yield Weight(f"{name}.{part}", f"{gguf}.{part}", f"{parameter}.{part}", (hidden,))

    yield from decoder_weights(spec, in_layer)
    if spec.norm_bias:
        yield Weight("model.norm.bias", "output_norm.bias", "norm.bias", (hidden,))


FAMILY = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    spec=_spec,
    weights=_weights,
    keys=words("use_bias norm_epsilon norm_type mlp_type activation_function"),
    defaults={
        "num_key_value_heads": 2,
        "use_bias": True,
        "norm_epsilon": 1e-5,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
    compiles=False,
    model="meshlm.workers.models.layer_norm:Starcoder2",
)
