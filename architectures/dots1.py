"""dots.llm1 (rednote-hilab 2025): experts scored by sigmoids, query and key heads normed; layers may slide."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import shown, words
from meshlm.architectures.deepseek_v2 import GGUF_EXPERT_KEYS
from meshlm.architectures.family import Family, GGUFFamily
from meshlm.architectures.glm4_moe import KEYS, sigmoid_gguf, sigmoid_spec, sigmoid_weights
from meshlm.architectures.layers import with_attention
from meshlm.architectures.qwen2 import windows
from meshlm.protocol.model import ModelSpec


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    for key, known in (("topk_method", ("noaux_tc",)), ("scoring_func", ("noaux_tc", "sigmoid"))):
        if config.get(key, known[0]) not in known:
            raise ValueError(f"{key} {shown(config[key])} is not supported; supported: {', '.join(known)}")
    spec = replace(sigmoid_spec(config, architecture), qk_norm=True)
    window, sliding = windows({**config, "use_sliding_window": True})
    return with_attention(spec, sliding, sliding_window=window)


FAMILY = Family(
    architecture="Dots1ForCausalLM",
    model_type="dots1",
    spec=_spec,
    weights=sigmoid_weights,
    keys=(KEYS - {"use_qk_norm"}) | words("moe_layer_freq scoring_func topk_method"),
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
        "max_window_layers": 62,
    },
    gguf=GGUFFamily("dots1", sigmoid_gguf, GGUF_EXPERT_KEYS, experts=True),
    compiles=False,
)
