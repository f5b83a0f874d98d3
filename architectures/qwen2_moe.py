"""Qwen2-MoE (Yang et al. 2024): Qwen2 with many small experts, and one that every token goes to, behind a sigmoid gate."""

from typing import Any

from msgspec.structs import replace

from meshlm.architectures.config_values import boolean, integer
from meshlm.architectures.dense import dense_gguf, dense_spec, layer_types, sliding_window
from meshlm.architectures.family import Family, GGUFFamily, GGUFMetadata
from meshlm.architectures.layers import with_attention, with_experts
from meshlm.architectures.moe import GGUF_KEYS, gguf_moe, layers_with_experts, moe_spec
from meshlm.architectures.weights import transformer_weights
from meshlm.protocol.model import ModelSpec

KEYS = frozenset(
    ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")
    + ("mlp_only_layers", "shared_expert_intermediate_size", "qkv_bias")
)
DEFAULTS = {
    "num_key_value_heads": 16,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "qkv_bias": True,
}


def _spec(config: dict[str, Any], architecture: str) -> ModelSpec:
    shared = integer(config, "shared_expert_intermediate_size")
    moe = replace(moe_spec(config), shared_intermediate_size=shared, shared_gate=shared > 0)
    window, sliding = _windows(config)
    spec = replace(dense_spec(config, architecture), attention_bias=boolean(config, "qkv_bias"), output_bias=False)
    spec = with_attention(spec, sliding, sliding_window=window)
    return with_experts(spec, moe, layers_with_experts(config))


def _windows(config: dict[str, Any]) -> tuple[int, tuple[bool, ...]]:
    """The window, and which layers use it: unless the file names them, every other one of the first. ValueError."""
    if not boolean(config, "use_sliding_window"):
        return 0, ()
    window, kinds, first = sliding_window(config), layer_types(config), integer(config, "max_window_layers")
    layers = range(integer(config, "num_hidden_layers"))
    sliding = tuple(
        layer % 2 == 0 and layer < first if kinds is None else kinds[layer] == "sliding_attention" for layer in layers
    )
    return (window, sliding) if window and any(sliding) else (0, ())


def _gguf(metadata: GGUFMetadata, architecture: str) -> ModelSpec:
    shared = int(metadata.get("expert_shared_feed_forward_length", 0))
    moe = gguf_moe(metadata, shared_intermediate_size=shared, shared_gate=shared > 0)
    return with_experts(dense_gguf(metadata, architecture), moe)


FAMILY = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    spec=_spec,
    weights=transformer_weights,
    keys=KEYS,
    defaults=DEFAULTS,
    gguf=GGUFFamily("qwen2moe", _gguf, GGUF_KEYS | {"expert_shared_feed_forward_length"}, experts=True),
    compiles=False,
)
