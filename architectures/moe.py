"""What mixtures of experts have in common: their sizes in config.json and .gguf files, and the weights of a layer's experts."""

from typing import Any

from meshlm.architectures.config_values import boolean, integer, positive, shown
from meshlm.architectures.family import GGUFMetadata, MetadataError
from meshlm.protocol.layers import MoESpec

GGUF_KEYS = frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length"))


def layers_with_experts(config: dict[str, Any]) -> tuple[bool, ...]:
    """Reads decoder_sparse_step and mlp_only_layers of a config.json; which layers have experts. ValueError."""
    step, layers = positive(config, "decoder_sparse_step", 1), integer(config, "num_hidden_layers")
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ValueError(f"mlp_only_layers must be a list of numbers of layers, got {shown(dense)}")
    found = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    if not any(found):
        raise ValueError("decoder_sparse_step and mlp_only_layers leave no layer with experts")
    return found


def moe_spec(config: dict[str, Any], num_experts: str = "num_experts", wide: str = "moe_intermediate_size") -> MoESpec:
    """The sizes of a config.json. num_experts, wide: the family's keys for them. KeyError, ValueError."""
    count = integer(config, num_experts)
    return checked(
        MoESpec(
            num_experts=count,
            num_experts_per_tok=integer(config, "num_experts_per_tok"),
            moe_intermediate_size=integer(config, wide),
            norm_topk_prob=boolean(config, "norm_topk_prob"),
        ),
        num_experts,
    )


def checked(moe: MoESpec, num_experts: str = "num_experts") -> MoESpec:
    """ValueError names the key that cannot be so."""
    if moe.num_experts < 1:
        raise ValueError(f"{num_experts} is {moe.num_experts}; it must be positive")
    if not 0 < moe.num_experts_per_tok <= moe.num_experts:
        raise ValueError(
            f"num_experts_per_tok is {moe.num_experts_per_tok}; it must be positive, and {num_experts} is {moe.num_experts}"
        )
    if moe.moe_intermediate_size < 1 or moe.shared_intermediate_size < 0:
        raise ValueError("moe_intermediate_size must be positive")
    if moe.num_experts % moe.n_group or not 0 < moe.topk_group <= moe.n_group:
        raise ValueError(f"n_group {moe.n_group} and topk_group {moe.topk_group} do not fit {moe.num_experts} experts")
    if moe.num_experts_per_tok > moe.topk_group * (moe.num_experts // moe.n_group):
        raise ValueError(f"topk_group {moe.topk_group} has fewer experts than num_experts_per_tok")
    return moe


def gguf_moe(metadata: GGUFMetadata, **family: Any) -> MoESpec:
    """The sizes of a .gguf file. family: what llama.cpp knows of it and the file does not say. MetadataError."""
    get = metadata.get
    try:
        return checked(
            MoESpec(
                num_experts=int(get("expert_count")),
                num_experts_per_tok=int(get("expert_used_count")),
                moe_intermediate_size=int(get("expert_feed_forward_length", get("feed_forward_length"))),
                **family,
            )
        )
    except ValueError as error:
        raise MetadataError(str(error)) from None
